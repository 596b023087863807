"""A model as the trainer, the evaluator and the sampler see it: plain pytrees in, plain pytrees out.

Modules are built once, abstractly; from there parameters are nested dicts of arrays, and `Model` binds them back to
the module for each of the calls that every family answers.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from flax import nnx, traverse_util

from mesanet_jax.flops import Flops
from mesanet_jax.models.language_model import LanguageModel
from mesanet_jax.models.lrt import LRT
from mesanet_jax.models.maglev import Maglev
from mesanet_jax.models.nanochat import Nanochat
from mesanet_jax.models.pha import ParallelHybrid

MODELS = {
    "language_model": LanguageModel,
    "lrt": LRT,
    "maglev": Maglev,
    "nanochat": Nanochat,
    "pha": ParallelHybrid,
}


@dataclasses.dataclass(frozen=True)
class Model:
    """One family at one size. `shapes` and `axes` mirror the parameter tree (shape structs, logical axis names)."""

    graphdef: nnx.GraphDef
    shapes: dict[str, Any]
    axes: dict[str, Any]
    make: Any

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Fresh float32 parameters; the same for every sharding."""
        return nnx.to_pure_dict(nnx.state(self.make(nnx.Rngs(params=key))))

    def bind(self, params) -> nnx.Module:
        return nnx.merge(self.graphdef, params)

    def loss(self, params, batch):
        """Nats of each target times its weight, [B,T] float32, of the function that decoding computes.

        `batch` as `mesanet_jax.data.loader` makes it.
        """
        return self.bind(params).loss(batch)

    def objective(self, params, batch, share=1.0):
        """What training minimises, [B,T], and {name: [B,T]} of its terms; of most families: the loss, {}.

        Their sums are divided by the valid tokens of the whole batch. `share` is these over all positions: what a term
        that is a mean over all positions is multiplied by.
        """
        return self.bind(params).objective(batch, share)

    def scores(self, params, batch):
        """(`loss`, {mode: nats [B,T]} of other ways to compute it, {name: scalar} about the computation)."""
        return self.bind(params).scores(batch)

    def observe(self, params, batch):
        """What the layers tell about their work on a batch: name -> {layer: array}; empty where none does."""
        return self.bind(params).observe(batch)

    def init_state(self, params, batch: int, *, max_length: int):
        """Decoding state for `batch` sequences of at most `max_length` tokens."""
        return self.bind(params).init_state(batch, max_length=max_length)

    def extend(self, params, tokens_BT, state):
        """Reads a chunk of tokens: (logits [B,T,V] float32, state)."""
        return self.bind(params).extend(tokens_BT, state)

    def step(self, params, tokens_B, state):
        """Reads one token: (logits [B,V] float32, state)."""
        return self.bind(params).step(tokens_B, state)

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`."""
        return self.bind(self.shapes).flops_per_token(seq_len)

    def parameter_count(self) -> int:
        """Parameters of the true vocabulary: the rows that only pad it are not counted."""
        total = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(self.shapes))
        return total - self.bind(self.shapes).padding_parameters()


def build(config) -> Model:
    """The model of a config's `model` section; nothing is allocated."""
    make = lambda rngs: MODELS[config.kind](config, rngs=rngs)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(params=0))))
    shapes = nnx.to_pure_dict(state)
    axes = traverse_util.unflatten_dict({path: variable.axes for path, variable in nnx.to_flat_state(state)})
    return Model(graphdef=graphdef, shapes=shapes, axes=axes, make=make)
