"""Griffin (arXiv 2402.19427): two blocks of Hawk, then one of local attention with a single key/value head.

Sizes: 140m, 440m, 1b, demo, smoke, in the backbone of MesaNet's comparison: RMSNorm, and SwiGLU with a hidden width
of about three times the stream's, where the paper has GeGLU. From the paper (appendix C): the width of the recurrence
for these widths of the stream, 16 blocks per gate, and the window of 1024 tokens. The feed-forward network is a
little wider where the model would otherwise have over 2 % fewer parameters than MesaNet.
"""

from mesanet_jax.recipes.backbone import backbone
from mesanet_jax.schema import Config

RECURRENCE_WIDTH = {"140m": 1024, "440m": 1536, "1b": 2048}
MLP_RATIO = {"140m": 3.125, "440m": 3.0, "1b": 3.125}
# Those of Hawk in MesaNet, Table 8: Griffin's own were not searched for.
PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}


def get_config(size: str = "140m") -> Config:
    config = backbone("griffin", size, ("hawk", "hawk", "sliding"))
    model = config.model
    model.hawk.num_blocks = 16
    model.sliding.kv_heads = 1
    if size in RECURRENCE_WIDTH:
        model.hawk.expansion = RECURRENCE_WIDTH[size] / model.dim
        model.mlp_ratio = MLP_RATIO[size]
        config.optimizer.learning_rate = PEAK_LEARNING_RATE[size]
    else:
        model.hawk.expansion = 4 / 3 if size == "demo" else 1.5
        model.layers = 4  # one period of the pattern and the beginning of another
        model.sliding.window = {"demo": 64, "smoke": 16}[size]
    return config
