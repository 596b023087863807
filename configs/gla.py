"""GLA as MesaNet (arXiv 2506.05233) compares with it: gated linear attention, one decay a head, in every block.

`440m-published` is the layer of its own paper (arXiv 2312.06635; `fla/layers/gla.py`) in the same backbone: a decay a key
channel, four heads with keys half as wide as values, an output gate; no input gate, convolution or normalised keys.
"""

from mesanet_jax.recipes.backbone import backbone, split_published

PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    scale, published = split_published(size)
    config = backbone("gla", scale, ("gla",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"gla-{size}"
        as_published(config.model)
    return config


def as_published(model) -> None:
    options = model.gla
    options.heads, options.key_size, options.value_size = 4, model.dim // 8, model.dim // 4
    options.conv_width = None
    options.normalize_keys = False
    options.input_gate = False
    options.decay = "low_rank"
    options.output_gate = True
