"""GLA (arXiv 2312.06635) as MesaNet (arXiv 2506.05233) compares it: gated linear attention with one decay per head.

Sizes: 140m, 440m, 1b, demo, smoke; each also with the suffix -published, as in 440m-published: the layer of the
family's own paper (`fla/layers/gla.py`) in the same backbone. It has a decay for each key channel, four heads with
keys half as wide as values, and an output gate, but no input gate, no convolution and no normalised keys.
"""

from mesanet_jax.recipes.backbone import backbone, split_published
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    scale, published = split_published(size)
    config = backbone("gla", scale, ("gla",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"gla-{size}"
        as_published(config.model)
    return config


def as_published(model: Config) -> None:
    """Sets the values of the family's own paper, in place."""
    options = model.gla
    options.heads, options.key_size, options.value_size = 4, model.dim // 8, model.dim // 4
    options.conv_width = None
    options.normalize_keys = False
    options.input_gate = False
    options.decay = "low_rank"
    options.output_gate = True
