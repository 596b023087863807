"""nanochat's Transformer (karpathy/nanochat 92d63d4) by its own recipe: 12 tokens a parameter, Muon, no mask of documents.

`d20` has 20 layers of width 1280, any other depth likewise. `demo` and `smoke` keep documents apart, like all of that size.
"""

from mesanet_jax.recipes import nanochat_recipe

SIZES = nanochat_recipe.SIZES
PATTERN = ("sliding", "sliding", "sliding", "attention")


def get_config(size: str = "d12"):
    config = nanochat_recipe.backbone("nanochat", size, PATTERN)
    config.name = f"nanochat-{size}"
    config.model.value_embeddings, config.model.smear, config.model.backout = "alternate", True, True
    if size not in nanochat_recipe.SMALL:
        nanochat_recipe.recipe(config)
    return config
