"""GSS (arXiv 2206.13947): gated state spaces in every block, wide enough to match the size of the other families.

Sizes: 140m, 440m, 1b, demo, smoke. MesaNet (arXiv 2506.05233) does not compare GSS, so the peak learning rates are
those of Hawk, the nearest family there (Table 8).
"""

from mesanet_jax.recipes.backbone import backbone
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}


def get_config(size: str = "140m") -> Config:
    config = backbone("gss", size, ("gss",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
