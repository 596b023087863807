"""Hawk-Mesa (MesaNet, arXiv 2506.05233, section 4): blocks of Hawk and Mesa in turn.

Sizes: 140m, 440m, 1b, demo, smoke. The paper does not say which of the two comes first;
`--config.model.pattern=mesa,hawk` is the other order.
"""

from mesanet_jax.recipes.backbone import backbone
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 2.5e-3, "440m": 2e-3, "1b": 2e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    config = backbone("hawk_mesa", size, ("hawk", "mesa"))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    if size == "demo":
        config.model.mesa.max_iters = 8
        config.model.mesa.chunk_size = 32
    return config
