"""Mamba2 (arXiv 2405.21060) as MesaNet (arXiv 2506.05233) compares it: a decay per head and no input gate.

Sizes: 140m, 440m, 1b, demo, smoke; each also with the suffix -published, as in 440m-published: the layer of the
family's own paper (`mamba_ssm/modules/mamba2.py`) in the same backbone, without the biases of its convolutions. It is
twice as wide as the stream, in heads of 64 that share queries and keys (C and B) of size 128. A step size sets both
the decay and the write strength; the values are convolved; D is a skip connection; and the output is gated before a
norm over all heads. The layer has a little over 6 D^2 instead of 4 D^2 parameters (D is the width of the stream); a
narrower feed-forward network keeps the total within 1 %.
"""

from mesanet_jax.recipes.backbone import backbone, split_published
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 3e-3, "440m": 2.5e-3, "1b": 2e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    scale, published = split_published(size)
    config = backbone("mamba2", scale, ("mamba2",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"mamba2-{size}"
        as_published(config.model)
    return config


def as_published(model: Config) -> None:
    """Sets the values of the family's own paper, in place."""
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
