"""Griffin (arXiv 2402.19427): two blocks of Hawk, then one of local attention with a single key/value head.

In the backbone of MesaNet's comparison (RMSNorm, SwiGLU of three times the width where the paper has GeGLU). The widths of
the recurrence are the paper's for these widths of the stream (its appendix C), and so are 16 blocks a gate and the window
of 1024; the feed-forward is a little wider where the total would fall more than 2 % short of MesaNet's.
"""

from mesanet_jax.recipes.backbone import backbone

RECURRENCE_WIDTH = {"140m": 1024, "440m": 1536, "1b": 2048}
MLP_RATIO = {"140m": 3.125, "440m": 3.0, "1b": 3.125}
PEAK_LEARNING_RATE = {"140m": 2e-3, "440m": 2.5e-3, "1b": 2e-3}  # Hawk's of MesaNet's Table 8, not scanned for Griffin


def get_config(size: str = "140m"):
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
