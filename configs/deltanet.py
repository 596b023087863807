"""DeltaNet as MesaNet (arXiv 2506.05233) compares with it: the delta rule in every block."""

from mesanet_jax.recipes.backbone import backbone

PEAK_LEARNING_RATE = {"140m": 3e-3, "440m": 3e-3, "1b": 1.5e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    config = backbone("deltanet", size, ("deltanet",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
