"""The Latent Recurrent Transformer (arXiv 2605.26797) in the recipe of `configs/maglev.py`, to be compared with it.

`d20` trains by turns of every other position (S = 2), `d20-k2` and `d20-k3` by two and three refinements of whole rows.
"""

from mesanet_jax.recipes import nanochat_recipe

SIZES = nanochat_recipe.SIZES
VARIANTS = {
    "": {"schedule": "interleaved", "turns": 2},
    "k2": {"schedule": "refined", "refinements": 2},
    "k3": {"schedule": "refined", "refinements": 3},
}


def get_config(size: str = "d12"):
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
