"""GSS (arXiv 2206.13947): gated state spaces in every block, as wide as makes the size of the other families.

MesaNet does not compare it: the peak learning rates are Hawk's, the nearest family there (its Table 8).
"""

from mesanet_jax.recipes.backbone import backbone

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}


def get_config(size: str = "140m"):
    config = backbone("gss", size, ("gss",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
