"""Gated DeltaNet as MesaNet (arXiv 2506.05233) compares with it: the delta rule with a decay a head, in every block.

`440m-published` is the layer of its own paper (arXiv 2412.06464; `fla/layers/gated_deltanet.py`) in the same backbone:
Mamba2's decay, convolution on values, an output gate, few wide heads of 3/4 and 3/2 of the stream's width in all for keys
and values. The layer has 6 D^2 parameters in place of 4 D^2; a narrower feed-forward keeps the total within 1 %.
"""

from mesanet_jax.recipes.backbone import backbone, split_published

PEAK_LEARNING_RATE = {"140m": 1e-3, "440m": 2.5e-3, "1b": 2e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    scale, published = split_published(size)
    config = backbone("gated_deltanet", scale, ("gated_deltanet",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"gated_deltanet-{size}"
        as_published(config.model)
    return config


def as_published(model) -> None:
    options = model.gated_deltanet
    options.heads, options.key_size, options.value_size = model.heads // 2, 3 * model.head_dim // 2, 3 * model.head_dim
    options.conv_on_value = True
    options.output_gate = True
    options.decay, options.decay_rate_init = "softplus", (0.0, 16.0)
    model.mlp_ratio = 2.375
