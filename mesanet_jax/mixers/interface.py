"""What every mixer has. Its calls all compute the same function, and tests/mixers/test_mixers.py checks that they do.

B batch, T time, D model width.
"""

from typing import Any, Protocol

import jax
from flax import nnx

from mesanet_jax.flops import Flops
from mesanet_jax.schema import Config, Field


class Mixer(Protocol):
    """The interface of a mixer; mixers are `nnx.Module`s and need not inherit from this class.

    A mixer that has statistics to report also has `with_stats(x_BTD, segment_ids_BT) -> (y_BTD, {name: array})`.
    """

    FIELDS: dict[str, Field]  # its options: the section of the model's config under the mixer's name

    @classmethod
    def check(cls, model: Config) -> None:
        """Raises UserError for options that do not fit together."""
        ...

    def __init__(self, model: Config, *, rngs: nnx.Rngs): ...

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """Mixes whole rows and keeps their documents apart (training)."""
        ...

    def init_state(self, batch: int, *, max_length: int, dtype: jax.typing.DTypeLike) -> Any:
        """Returns the decoding state before the first token of a text of at most `max_length` tokens."""
        ...

    def extend(self, x_BTD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Mixes the next T tokens of one document per row and returns the new state (prefill)."""
        ...

    def decode_step(self, x_BD: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Mixes the next token and returns the new state (decoding)."""
        ...

    def flops_per_token(self, seq_len: int) -> Flops:
        """Returns the FLOPs per token of a row of `seq_len` tokens."""
        ...
