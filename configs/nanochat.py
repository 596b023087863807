"""nanochat's Transformer (karpathy/nanochat 92d63d4) by its own recipe: 12 tokens a parameter, Muon, no mask of documents.

`d20` has 20 layers of width 1280, any other depth likewise. `demo` and `smoke` keep documents apart, like all of that size.
"""

import math

from configs import nanochat_recipe
from configs.backbone import small
from mesanet_jax.config import default_config

DEPTHS = ("d12", "d20")
SMALL = ("demo", "smoke")
SIZES = (*DEPTHS, *SMALL)
PATTERN = ("sliding", "sliding", "sliding", "attention")
HEAD_DIM = 128


def get_config(size: str = "d12"):
    config = backbone("nanochat", size, PATTERN)
    config.name = f"nanochat-{size}"
    config.model.value_embeddings, config.model.smear, config.model.backout = "alternate", True, True
    if size not in SMALL:
        nanochat_recipe.recipe(config)
    return config


def backbone(kind: str, size: str, pattern: tuple[str, ...]):
    """A run of a kind of model that is built on nanochat, without its name and, of a depth, without its length."""
    depth = size.removeprefix("d")
    if size not in SMALL and not (size.startswith("d") and depth.isdigit()):
        raise ValueError(f"no size {size!r}; choose from {', '.join(SIZES)}, or another depth, as d16")
    config = default_config(pattern, kind=kind)
    model = config.model
    if size in SMALL:
        small(config, size)
        model.window = {"demo": 64, "smoke": 16}[size]
        if size == "smoke":
            model.layers = 4  # one period of nanochat's pattern
        nanochat_recipe.optimizer(config)
    else:
        model.layers = int(depth)
        model.heads, model.head_dim = math.ceil(64 * model.layers / HEAD_DIM), HEAD_DIM
        model.dim = model.heads * HEAD_DIM
        model.vocab_size, model.vocab_multiple = 32_768, 64
        model.reset_at_documents = False
    with_scalars = (*config.optimizer.no_decay, "scales", "smear", "backout", "value_embedding")
    config.optimizer.no_decay = with_scalars  # of AdamW, if it is chosen
    return config
