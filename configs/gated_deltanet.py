"""Gated DeltaNet (arXiv 2412.06464) as MesaNet (arXiv 2506.05233) compares it: the delta rule with a decay per head.

Sizes: 140m, 440m, 1b, demo, smoke; each also with the suffix -published, as in 440m-published: the layer of the
family's own paper (`fla/layers/gated_deltanet.py`) in the same backbone. It has Mamba2's decay, a convolution on the
values, an output gate, and few, wide heads: over all heads, keys are 3/4 and values 3/2 as wide as the stream. The
layer has 6 D^2 instead of 4 D^2 parameters (D is the width of the stream); a narrower feed-forward network keeps the
total within 1 %.
"""

from mesanet_jax.recipes.backbone import backbone, split_published
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 1e-3, "440m": 2.5e-3, "1b": 2e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    scale, published = split_published(size)
    config = backbone("gated_deltanet", scale, ("gated_deltanet",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"gated_deltanet-{size}"
        as_published(config.model)
    return config


def as_published(model: Config) -> None:
    """Sets the values of the family's own paper, in place."""
    options = model.gated_deltanet
    options.heads, options.key_size, options.value_size = model.heads // 2, 3 * model.head_dim // 2, 3 * model.head_dim
    options.conv_on_value = True
    options.output_gate = True
    options.decay, options.decay_rate_init = "softplus", (0.0, 16.0)
    model.mlp_ratio = 2.375
