"""Mamba2 as MesaNet (arXiv 2506.05233) compares with it: a decay a head and no input gate, in every block.

`440m-published` is the layer of its own paper (arXiv 2405.21060; `mamba_ssm/modules/mamba2.py`) in the same backbone, but
for the biases of its convolutions: twice the stream's width in heads of 64, which share queries and keys (C and B, of size
128), a step size that sets decay and write, convolution on values, the skip D, a gate before a norm over all heads. The
layer has a little over 6 D^2 parameters in place of 4 D^2; a narrower feed-forward keeps the total within 1 %.
"""

from mesanet_jax.recipes.backbone import backbone, split_published

PEAK_LEARNING_RATE = {"140m": 3e-3, "440m": 2.5e-3, "1b": 2e-3}  # Table 8, 15B tokens


def get_config(size: str = "140m"):
    scale, published = split_published(size)
    config = backbone("mamba2", scale, ("mamba2",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"mamba2-{size}"
        as_published(config.model)
    return config


def as_published(model) -> None:
    options = model.mamba2
    options.heads, options.key_heads = 4 * model.heads, 1
    options.key_size, options.value_size = model.head_dim, model.head_dim // 2
    options.conv_on_value = True
    options.normalize_keys = False
    options.decay = "softplus"
    options.skip = True
    options.output_norm = "all"
    options.output_gate, options.output_gate_form = True, "silu_before_norm"
    model.mlp_ratio = 2.25
