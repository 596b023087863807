"""PHA (arXiv 2606.16093): GSS, grouped-query attention and two feed-forwards side by side in every block.

Neither its dimensions nor its recipe are published. These sizes have its parameter counts (heads of 64, GPT-2's vocabulary,
tied embeddings), 12B tokens are those of its OpenWebText run, and whatever else the abstract leaves open is a field of
`mesanet_jax/models/pha.py`. `90m-sequential` is `90m` but for what VARIANTS names; `mesanet_jax.compare` takes them together.
"""

from mesanet_jax.config import default_config
from mesanet_jax.recipes.backbone import small

PAPER = {"90m": (640, 9, 10, 2), "125m": (768, 10, 12, 4), "180m": (896, 11, 14, 2)}  # width, blocks, heads, of keys
SMALL = ("demo", "smoke")
SIZES = (*PAPER, *SMALL)

VARIANTS = {
    "attention_only": {"pattern": ("attention",)},  # and a feed-forward that makes up for GSS, below
    "no_gss": {"pattern": ("attention",)},
    "no_attention": {"pattern": ("gss",)},
    "no_auxiliary": {"auxiliary": "none"},
    "sequential": {"composition": "sequential"},
    "uniform": {"mixing": "uniform"},
    "no_branch_norm": {"branch_norm": False},
    "alpha1": {"alpha": 1.0},
}
MATCHED_MLP_RATIO = {"90m": 5.277, "125m": 5.272, "180m": 5.269, "demo": 4.34, "smoke": 4.42}


def get_config(size: str = "125m"):
    """`size` is one of SIZES, alone or with a variant as in `90m-no_gss`."""
    scale, dash, variant = size.partition("-")
    if scale not in SIZES or (dash and variant not in VARIANTS):
        raise ValueError(f"no {size!r}; sizes: {', '.join(SIZES)}; variants, as in 90m-no_gss: {', '.join(VARIANTS)}")
    config = default_config(("gss", "attention"), kind="pha")
    config.name = f"pha-{size}"
    model = config.model
    model.gss.expansion, model.gss.ssm_width, model.gss.modes = 1.0, 0.25, 64
    model.attention.cosine = True
    if scale in PAPER:
        model.dim, model.layers, model.heads, model.attention.kv_heads = PAPER[scale]
        model.head_dim, model.mlp_ratio = 64, 4.0
        recipe(config)
    else:
        small(config, scale)
        model.attention.kv_heads = 2
        model.auxiliary_mlp_ratio = 0.75  # a quarter of the other, as at the other sizes
        model.gss.modes = 64 if scale == "demo" else 16
    change(config, scale, variant)
    return config


def recipe(config) -> None:
    """12B tokens by a common recipe for such sizes; the paper needs neither warm-up nor clipping, and has no other numbers."""
    config.steps = 23_000
    config.data.seq_len, config.data.batch_size = 1024, 512
    config.optimizer.learning_rate, config.optimizer.b2 = 6e-4, 0.95


def change(config, scale: str, variant: str) -> None:
    """Makes of a config its variant."""
    if not variant:
        return
    for name, value in VARIANTS[variant].items():
        config.model[name] = value
    if variant == "attention_only":
        config.model.mlp_ratio = MATCHED_MLP_RATIO[scale]
    for mixer in {"gss", "attention"} - set(config.model.pattern):
        with config.unlocked():
            del config.model[mixer]
