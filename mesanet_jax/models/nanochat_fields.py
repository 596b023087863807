"""The config of nanochat's Transformer (karpathy/nanochat 92d63d4): layers by name, fields, checks."""

import dataclasses
import math
from typing import ClassVar

from mesanet_jax.errors import UserError
from mesanet_jax.models import fields
from mesanet_jax.schema import Config, Field


@dataclasses.dataclass(frozen=True)
class AttentionLayer:
    """A kind of layer that `model.pattern` may list; the layers differ only in how far back a token sees."""

    sliding: bool
    FIELDS: ClassVar[dict[str, Field]] = {}

    def check(self, model: Config) -> None:
        """Nothing to check: heads and the window are fields of the model."""

    def window(self, model: Config) -> int | None:
        """The number of visible tokens, the current one included; None for all of them."""
        return model.window if self.sliding else None


LAYERS = {"attention": AttentionLayer(sliding=False), "sliding": AttentionLayer(sliding=True)}
FIELDS = (
    fields.VOCABULARY
    | fields.SIZES
    | fields.COMPUTATION
    | {
        "mlp_ratio": Field(4.0, "feed-forward width divided by dim", above=0.0, fixed=True),
        "logit_softcap": Field(15.0, "c in c tanh(logits / c); none: no cap", kind=float, above=0.0, fixed=True),
        "tie_embeddings": Field(
            False,
            "always false: the embedding and the head start at scales that differ by a factor of 800",
            choices=(False,),
            fixed=True,
        ),
        "kv_heads": Field(
            None,
            "number of key/value heads, a divisor of heads; none: one per query head",
            kind=int,
            at_least=1,
            fixed=True,
        ),
        "window": Field(
            512, "number of tokens that a token sees in a sliding layer, itself included", at_least=1, fixed=True
        ),
        "rope_base": Field(100_000.0, "base of the rotary frequencies", above=1.0, fixed=True),
        "qk_scale": Field(1.2, "factor on queries and keys after their norm", above=0.0, fixed=True),
        "value_embeddings": Field(
            "none",
            "layers that add a gated value vector per token, looked up in a table of their own",
            choices=("none", "alternate", "all"),
            fixed=True,
        ),
        "smear": Field(
            False,
            "add the embedding of the token before to each embedding, through a gate that starts at 0",
            fixed=True,
        ),
        "backout": Field(
            False,
            "subtract a learned share, initially 0.2, of the middle layer's stream from the last layer's",
            fixed=True,
        ),
    }
)


def check(model: Config) -> None:
    """Raises UserError for a combination of fields that the Transformer cannot have."""
    fields.check_layers(model)
    if model.heads % (model.kv_heads or model.heads):
        raise UserError(f"config.model.kv_heads={model.kv_heads}: must divide config.model.heads={model.heads}")
    if model.head_dim % 2:
        raise UserError(f"config.model.head_dim={model.head_dim}: rotary positions need an even size")


def period(model: Config, *patterns: tuple[str, ...]) -> int:
    """After how many blocks all `patterns`, and the layers with value embeddings, repeat; at most `model.layers`."""
    alternate = 2 if model.value_embeddings == "alternate" else 1
    return min(math.lcm(alternate, *map(len, patterns)), model.layers)


def windows(model: Config, pattern: tuple[str, ...], length: int) -> tuple[int | None, ...]:
    """The number of visible tokens in each of the first `length` blocks; None for all of them."""
    return tuple(LAYERS[pattern[block % len(pattern)]].window(model) for block in range(length))


def has_value_embedding(model: Config, layer: int) -> bool:
    """Whether a layer has value embeddings; "alternate" means the last layer and every second one before it."""
    return {
        "none": False,
        "alternate": layer % 2 == (model.layers - 1) % 2,
        "all": True,
    }[model.value_embeddings]
