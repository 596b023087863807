"""xLSTM (arXiv 2405.04517) as MesaNet (arXiv 2506.05233) compares it: an mLSTM in every block.

Sizes: 140m, 440m, 1b, demo, smoke; each also with the suffix -published, as in 440m-published: the layer of xLSTM 7B
(arXiv 2503.13427; `xlstm/xlstm_large/model.py`) in the same backbone, with the RMSNorm of the other families where that
paper has a LayerNorm. It has keys half as large as values, gates capped at 15, input gates that start closed, a sigmoid
output gate, and no convolution.
"""

from mesanet_jax.recipes.backbone import backbone, split_published
from mesanet_jax.schema import Config

PEAK_LEARNING_RATE = {"140m": 2.5e-3, "440m": 3e-3, "1b": 1.5e-3}  # MesaNet, Table 8, 15B tokens


def get_config(size: str = "140m") -> Config:
    scale, published = split_published(size)
    config = backbone("xlstm", scale, ("mlstm",))
    config.optimizer.learning_rate = PEAK_LEARNING_RATE.get(scale, config.optimizer.learning_rate)
    if published:
        config.name = f"xlstm-{size}"
        as_published(config.model)
    return config


def as_published(model: Config) -> None:
    """Sets the values of xLSTM 7B, in place."""
    options = model.mlstm
    options.key_size = model.head_dim // 2
    options.conv_width = None
    options.gate_softcap = 15.0
    options.input_bias_init, options.input_bias_init_std = -10.0, 0.0
    options.output_gate, options.output_gate_form = True, "sigmoid"
