"""The Transformer baseline of MesaNet (arXiv 2506.05233): softmax attention with rotary positions in every block.

Sizes: 140m, 440m, 1b, demo, smoke.
"""

from mesanet_jax.recipes.backbone import backbone
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 2.5e-3, "440m": 1.5e-3, "1b": 2e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    config = backbone("transformer", size, ("attention",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
