"""Hawk (arXiv 2402.19427) as MesaNet (arXiv 2506.05233) compares it: the RG-LRU in every block.

Sizes: 140m, 440m, 1b, demo, smoke. The recurrence is 1.25 times as wide as the stream (MesaNet, appendix G).
"""

from mesanet_jax.recipes.backbone import backbone
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    config = backbone("hawk", size, ("hawk",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
