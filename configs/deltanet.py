"""DeltaNet (arXiv 2406.06484) as MesaNet (arXiv 2506.05233) compares it: the delta rule in every block.

Sizes: 140m, 440m, 1b, demo, smoke.
"""

from mesanet_jax.recipes.backbone import backbone
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 3e-3, "440m": 3e-3, "1b": 1.5e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    config = backbone("deltanet", size, ("deltanet",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
