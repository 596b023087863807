"""The interface of a model: what the trainer, the evaluator and the sampler need, and nothing else.

B batch, T time, V the true vocabulary (without the rows that only pad its tables).
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
from flax import nnx

from mesanet_jax.flops import Flops
from mesanet_jax.schema import Config, Field

# "inputs", "targets", "segment_ids" and "weights", each [B,T], as `mesanet_jax.data.loader` makes them.
Batch = Mapping[str, jax.Array]
LayerStats = dict[str, dict[int, jax.Array]]  # name -> {layer: a value of that layer}


class Decoder(Protocol):
    """A model that predicts each token from those before it; a class of `mesanet_jax.models.MODELS` at one size.

    Every model is an `nnx.Module`, and a file in this folder implements each method. None of the methods changes the
    module: decoding states are arguments and results.
    """

    MIXERS: dict[str, Any]  # what `model.pattern` may list, each with `FIELDS` and `check(model)`
    FIELDS: dict[str, Field]  # the fields of `config.model` for this kind of model

    def __init__(self, model: Config, *, rngs: nnx.Rngs) -> None:
        """Creates the float32 parameters for a checked `config.model`."""

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError for a combination of fields that no model of this kind can have."""

    def loss(self, batch: Batch) -> jax.Array:
        """The negative log-likelihood of each target in nats, times its weight: [B,T] float32.

        This is the loss of the function that decoding computes.
        """
        ...

    def objective(self, batch: Batch, share: jax.Array | float) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What training minimises, [B,T] float32, and its terms by name, each [B,T].

        The trainer divides the sum of each by the valid tokens of the whole batch. `share` is the number of valid
        tokens divided by the number of all positions: a term that is a mean over all positions is multiplied by it.
        """
        ...

    def scores(self, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """(`loss`, the loss [B,T] of other ways to compute the model by name, scalars about the computation)."""
        ...

    def layer_stats(self, batch: Batch) -> LayerStats:
        """Statistics of the layers on a batch, such as solver iterations; empty if no layer has any."""
        ...

    def init_state(self, batch: int, *, max_length: int) -> Any:
        """The decoding state of an empty past, for `batch` sequences of at most `max_length` tokens."""

    def extend(self, tokens_BT: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Reads T further tokens of one document: (logits [B,T,V] float32, state)."""
        ...

    def decode_step(self, tokens_B: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Reads one further token: (logits [B,V] float32, state)."""
        ...

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`, the head included; the parameters may be shape structs."""
        ...

    def padding_parameters(self) -> int:
        """The number of parameters in table rows that only pad the vocabulary; they may be shape structs."""
        ...
