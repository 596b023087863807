"""The Latent Recurrent Transformer, LRT (arXiv 2605.26797), in the training recipe of `configs/maglev.py`.

Sizes: d12, d20, demo, smoke, or any other depth. d20 trains in two turns, each of every other position (S = 2).
d20-k2 and d20-k3 instead refine whole rows two or three times.
"""

from mesanet_jax.recipes import nanochat_recipe
from mesanet_jax.schema import Config

SIZES = nanochat_recipe.SIZES
VARIANTS = {
    "": {"schedule": "interleaved", "turns": 2},
    "k2": {"schedule": "refined", "refinements": 2},
    "k3": {"schedule": "refined", "refinements": 3},
}


def get_config(size: str = "d12") -> Config:
    """`size` is one of SIZES, alone or with a variant as in `d20-k3`."""
    scale, dash, variant = size.partition("-")
    if variant not in VARIANTS or (dash and not variant):
        raise ValueError(f"no {size!r}; variants, as in d20-k3: {', '.join(filter(None, VARIANTS))}")
    config = nanochat_recipe.backbone("lrt", scale, ("sliding",))
    config.name = f"lrt-{size}"
    config.model.update(VARIANTS[variant])
    if scale not in nanochat_recipe.SMALL:
        nanochat_recipe.recipe(config, ratio=100, batch_tokens=2**19)
    return config
