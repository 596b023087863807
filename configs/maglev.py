"""Maglev (arXiv 2608.02870): a sliding-window decoder that reads its own memory, and the Transformers it is compared with.

`d20` is the paper's 435M without embeddings, 43.52B tokens; whatever it leaves open is a field of
`mesanet_jax/models/maglev.py` and `memory.py`. `d20-separate` has two stacks and lambda 1 (its best), `d20-sliding` and
`d20-interleaved` are the same recipe without a memory; `configs/lrt.py` has LRT.
"""

from mesanet_jax.recipes import nanochat_recipe

SIZES = nanochat_recipe.SIZES
SLIDING, INTERLEAVED = ("sliding",), ("sliding", "attention")
# Kind of model, pattern, values.
VARIANTS = {
    "": ("maglev", SLIDING, {"prefiller_pattern": INTERLEAVED, "consistency_weight": 0.1}),
    "separate": ("maglev", SLIDING, {"prefiller_pattern": INTERLEAVED, "consistency_weight": 1.0, "sharing": "separate"}),
    "sliding": ("nanochat", SLIDING, {}),
    "interleaved": ("nanochat", INTERLEAVED, {}),
}  # fmt: skip


def get_config(size: str = "d12"):
    """`size` is one of SIZES, alone or with a variant as in `d20-separate`."""
    scale, dash, variant = size.partition("-")
    if variant not in VARIANTS or (dash and not variant):
        raise ValueError(f"no {size!r}; variants, as in d20-separate: {', '.join(filter(None, VARIANTS))}")
    kind, pattern, values = VARIANTS[variant]
    config = nanochat_recipe.backbone(kind, scale, pattern)
    config.name = f"maglev-{size}"
    config.model.update(values)
    if scale not in nanochat_recipe.SMALL:
        nanochat_recipe.recipe(config, ratio=100, batch_tokens=2**19)
    return config
