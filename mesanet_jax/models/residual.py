"""What nanochat (karpathy/nanochat 92d63d4) does to the residual stream between its blocks.

B batch, T time, D model width, L layers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.layers import Initializer, Linear, param
from mesanet_jax.models.nanochat_block import GATE_INIT

SMEAR_CHANNELS = 24


class LayerScales(NamedTuple):
    """The scalars of layers: arrays [L] for all of them, or scalars for one."""

    residual: jax.Array
    embedding: jax.Array
    memory: jax.Array | None  # None if the memory is not added to the stream


class Scales(nnx.Module):
    """The residual scalars of each layer: r from 1.15 down to 1.05, e from 0.20 down to 0.05, m constant at first.

    Args:
      memory_scale: initial value of m (LRT, arXiv 2605.26797, released code); None for no m.
    """

    def __init__(self, layers: int, *, memory_scale: float | None = None, rngs: nnx.Rngs):
        def falling(first: float, last: float) -> Initializer:
            return lambda key, shape, dtype: jnp.linspace(first, last, layers, dtype=dtype)

        constant = jax.nn.initializers.constant
        self.residual_scale = param(rngs, falling(1.15, 1.05), (layers,), (None,))
        self.embedding_scale = param(rngs, falling(0.20, 0.05), (layers,), (None,))
        self.memory_scale = None if memory_scale is None else param(rngs, constant(memory_scale), (layers,), (None,))

    def of_layers(self) -> LayerScales:
        """The scalars of all layers."""
        memory_L = None if self.memory_scale is None else self.memory_scale[...]
        return LayerScales(self.residual_scale[...], self.embedding_scale[...], memory_L)


def mix(scales: LayerScales, x_BTD: jax.Array, x0_BTD: jax.Array, memory_BTD: jax.Array | None) -> jax.Array:
    """What the block of one layer reads: r x + e x_0 + m memory, summed in float32 like the scalars."""
    mixed_BTD = scales.residual * x_BTD + scales.embedding * x0_BTD
    if scales.memory is not None and memory_BTD is not None:
        mixed_BTD += scales.memory * memory_BTD
    return mixed_BTD.astype(x_BTD.dtype)


class Smear(nnx.Module):
    """e_t + amount sigmoid(w e_t[:24]) e_{t-1} on normed embeddings e; the amount starts at zero."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        channels = min(SMEAR_CHANNELS, dim)
        self.gate = Linear(channels, 1, axes=(None, None), rngs=rngs, init=GATE_INIT)
        self.amount = param(rngs, jax.nn.initializers.zeros, (1,), (None,))

    def __call__(self, e_BTD: jax.Array, before_BTD: jax.Array) -> jax.Array:
        """The smeared embeddings; `before_BTD` holds the embedding of the token before each one."""
        gate_BT1 = jax.nn.sigmoid(self.gate(e_BTD[..., :SMEAR_CHANNELS]))
        return (e_BTD + self.amount[...] * gate_BT1 * before_BTD).astype(e_BTD.dtype)
