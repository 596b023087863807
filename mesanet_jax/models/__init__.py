"""A model as the trainer, the evaluator and the sampler see it: plain pytrees in, plain pytrees out.

Each kind of model is a class with the methods of `Decoder` (interface.py), in a file of its own. Modules are built
once, abstractly; from there on parameters are nested dicts of arrays, and `Model` binds them to the module for each
call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from flax import nnx, traverse_util

from mesanet_jax.flops import Flops
from mesanet_jax.models.interface import Batch, Decoder, LayerStats
from mesanet_jax.models.language_model import LanguageModel
from mesanet_jax.models.lrt import LRT
from mesanet_jax.models.maglev import Maglev
from mesanet_jax.models.nanochat import Nanochat
from mesanet_jax.models.pha import ParallelHybrid
from mesanet_jax.schema import Config

Params = dict[str, Any]  # nested dicts of arrays, or of shape structs

MODELS: dict[str, type[Decoder]] = {
    "language_model": LanguageModel,
    "lrt": LRT,
    "maglev": Maglev,
    "nanochat": Nanochat,
    "pha": ParallelHybrid,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """One kind of model at one size. The calls are those of `Decoder`, which documents them, with parameters first.

    Attributes:
      graphdef: the module without its parameters.
      shapes: the parameter tree, with shape structs as leaves.
      axes: the parameter tree, with tuples of logical axis names as leaves.
      make: creates the module from random keys.
    """

    graphdef: nnx.GraphDef
    shapes: Params
    axes: dict[str, Any]
    make: Callable[[nnx.Rngs], nnx.Module]

    def init(self, key: jax.Array) -> Params:
        """Fresh float32 parameters; they are the same for every sharding."""
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=key))))

    def bind(self, params: Params) -> Decoder:
        """The module with these parameters."""
        return cast(Decoder, nnx.merge(self.graphdef, params))

    def loss(self, params: Params, batch: Batch) -> jax.Array:
        """The negative log-likelihood of each target in nats, times its weight: [B,T] float32."""
        return self.bind(params).loss(batch)

    def objective(
        self, params: Params, batch: Batch, share: jax.Array | float = 1.0
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """What training minimises, [B,T], and its terms by name, each [B,T]."""
        return self.bind(params).objective(batch, share)

    def scores(self, params: Params, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """(`loss`, the loss [B,T] of other ways to compute the model by name, scalars about the computation)."""
        return self.bind(params).scores(batch)

    def layer_stats(self, params: Params, batch: Batch) -> LayerStats:
        """Statistics of the layers on a batch: name -> {layer: array}; empty if no layer has any."""
        return self.bind(params).layer_stats(batch)

    def init_state(self, params: Params, batch: int, *, max_length: int) -> Any:
        """The decoding state of an empty past, for `batch` sequences of at most `max_length` tokens."""
        return self.bind(params).init_state(batch, max_length=max_length)

    def extend(self, params: Params, tokens_BT: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Reads T further tokens of one document: (logits [B,T,V] float32, state)."""
        return self.bind(params).extend(tokens_BT, state)

    def decode_step(self, params: Params, tokens_B: jax.Array, state: Any) -> tuple[jax.Array, Any]:
        """Reads one further token: (logits [B,V] float32, state)."""
        return self.bind(params).decode_step(tokens_B, state)

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`, the head included."""
        return self.bind(self.shapes).flops_per_token(seq_len)

    def parameter_count(self) -> int:
        """The number of parameters, without the table rows that only pad the vocabulary."""
        total = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.shapes))
        return total - self.bind(self.shapes).padding_parameters()


def build(model: Config) -> Model:
    """The model of a checked `config.model`; nothing is allocated."""

    def make(rngs: nnx.Rngs) -> nnx.Module:
        return cast(nnx.Module, MODELS[model.kind](model, rngs=rngs))

    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    shapes = nnx.to_pure_dict(state)
    axes = traverse_util.unflatten_dict({path: variable.axes for path, variable in nnx.to_flat_state(state)})
    return Model(graphdef=graphdef, shapes=shapes, axes=axes, make=make)
