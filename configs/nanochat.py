"""The Transformer of nanochat (github.com/karpathy/nanochat, commit 92d63d4) in its own training recipe.

Sizes: d12, d20, demo, smoke, or any other depth; d20 has 20 layers of width 1280. The recipe trains on 12 tokens per
parameter with Muon. Documents in a row are not kept apart, except in demo and smoke.
"""

from mesanet_jax.recipes import nanochat_recipe
from mesanet_jax.schema import Config

SIZES = nanochat_recipe.SIZES
PATTERN = ("sliding", "sliding", "sliding", "attention")


def get_config(size: str = "d12") -> Config:
    config = nanochat_recipe.backbone("nanochat", size, PATTERN)
    config.name = f"nanochat-{size}"
    config.model.value_embeddings, config.model.smear, config.model.backout = "alternate", True, True
    if size not in nanochat_recipe.SMALL:
        nanochat_recipe.recipe(config)
    return config
