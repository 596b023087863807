"""PHA (arXiv 2606.16093): GSS, grouped-query attention and two feed-forward networks side by side in every block.

Sizes: 90m, 125m, 180m, demo, smoke; 90m-sequential is 90m with the change that VARIANTS names, and so on for the other
variants. `mesanet_jax.compare` compares them in one report.

Only the paper's abstract and introduction were available to us, without its dimensions and its training recipe. The
sizes here have the paper's parameter counts (with heads of size 64, GPT-2's vocabulary and tied embeddings), and
train on 12B tokens like its OpenWebText run. What else the abstract leaves open is an option in
`mesanet_jax/models/pha.py`.
"""

from mesanet_jax.config import default_config
from mesanet_jax.recipes.backbone import small
from mesanet_jax.schema import Config

PAPER = {"90m": (640, 9, 10, 2), "125m": (768, 10, 12, 4), "180m": (896, 11, 14, 2)}  # width, blocks, heads, kv heads
SMALL = ("demo", "smoke")
SIZES = (*PAPER, *SMALL)

VARIANTS = {
    "attention_only": {"pattern": ("attention",)},  # with a wider feed-forward network in place of GSS, see below
    "no_gss": {"pattern": ("attention",)},
    "no_attention": {"pattern": ("gss",)},
    "no_auxiliary": {"auxiliary": "none"},
    "sequential": {"composition": "sequential"},
    "uniform": {"mixing": "uniform"},
    "no_branch_norm": {"branch_norm": False},
    "alpha1": {"alpha": 1.0},
}
# The feed-forward ratios that give attention_only as many parameters as the full model.
MATCHED_MLP_RATIO = {"90m": 5.277, "125m": 5.272, "180m": 5.269, "demo": 4.34, "smoke": 4.42}


def get_config(size: str = "125m") -> Config:
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
        model.auxiliary_mlp_ratio = 0.75  # a quarter of the main network's, as at the other sizes
        model.gss.modes = 64 if scale == "demo" else 16
    apply_variant(config, scale, variant)
    return config


def recipe(config: Config) -> None:
    """Sets a common recipe for models of this size, over 12B tokens, in place.

    Of its own recipe, the abstract only says that it needs neither warm-up nor clipping.
    """
    config.steps = 23_000
    config.data.seq_len, config.data.batch_size = 1024, 512
    config.optimizer.learning_rate, config.optimizer.b2 = 6e-4, 0.95


def apply_variant(config: Config, scale: str, variant: str) -> None:
    """Changes a run into its variant, in place; an empty name changes nothing."""
    if not variant:
        return
    for name, value in VARIANTS[variant].items():
        config.model[name] = value
    if variant == "attention_only":
        config.model.mlp_ratio = MATCHED_MLP_RATIO[scale]
    for mixer in {"gss", "attention"} - set(config.model.pattern):
        with config.unlocked():
            del config.model[mixer]
