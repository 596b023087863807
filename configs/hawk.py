"""Hawk (arXiv 2402.19427): the RG-LRU in every block, 1.25 times as wide as the stream (MesaNet, appendix G)."""

from mesanet_jax.recipes.backbone import backbone

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    config = backbone("hawk", size, ("hawk",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(size, config.optimizer.learning_rate)
    return config
