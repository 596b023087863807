"""Maglev (arXiv 2608.02870), a sliding-window decoder that reads its own memory, and the paper's Transformer baselines.

Sizes: d12, d20, demo, smoke, or any other depth. d20 is the paper's model of 435M parameters without embeddings,
trained on 43.52B tokens. Variants: d20-separate has two stacks and lambda = 1 (the paper's best); d20-sliding and
d20-interleaved have the same recipe but no memory. `configs/lrt.py` has LRT. What the paper leaves open is an option
in `mesanet_jax/models/maglev.py` or `mesanet_jax/models/memory.py`.
"""

from mesanet_jax.recipes import nanochat_recipe
from mesanet_jax.schema import Config

SIZES = nanochat_recipe.SIZES
SLIDING, INTERLEAVED = ("sliding",), ("sliding", "attention")
MEMORY = {"prefiller_pattern": INTERLEAVED, "consistency_weight": 0.1}
# (kind of model, pattern, values) by variant.
VARIANTS = {
    "": ("maglev", SLIDING, MEMORY),
    "separate": ("maglev", SLIDING, MEMORY | {"consistency_weight": 1.0, "sharing": "separate"}),
    "sliding": ("nanochat", SLIDING, {}),
    "interleaved": ("nanochat", INTERLEAVED, {}),
}


def get_config(size: str = "d12") -> Config:
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
