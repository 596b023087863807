"""A memory read through keys and values: those of the position before's final state are mixed into the token's own.

    k = g_local k + g_memory W_k m,    v = g_local v + g_memory W_v m,    g = 2 sigmoid(G a)

(Maglev, arXiv 2608.02870, Eq. 6-8; LRT, arXiv 2605.26797.) What is mixed is what a cache holds, so a window of keys
and values needs no more room than without a memory.

B batch, T time, D model width, G key/value heads, K head size, N gates a token.
"""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx

from mesanet_jax.layers import Linear, RMSNorm, rms_normalize
from mesanet_jax.schema import Field

# Maglev's text leaves most of these open; LRT's code has gates a head, on raw keys. Maglev's Eq. 8 is "elementwise", which
# either choice of gate is; a gate a channel of rotated keys would make scores depend on where two tokens are in the row,
# no longer on their distance alone, and costs 7 % of a step.
FIELDS = {
    "gate": Field("head", "gates of the mix: one a channel of keys and values, or one a key/value head", choices=("channel", "head"), fixed=True),
    "gate_input": Field("normed", "what gates read: the sublayer's normed input, or the stream itself", choices=("normed", "stream"), fixed=True),
    "gate_channels": Field(None, "they read so many of its first channels; none: all", kind=int, at_least=1, fixed=True),
    "memory_gate_bias": Field(None, "initial bias of the memory's gate, 2 sigmoid(it); none: no bias, a gate of 1", kind=float, fixed=True),
    "mix_keys": Field(
        "normed", "keys are mixed after rotation and norm of each, or raw, before both", choices=("normed", "raw"), fixed=True
    ),
    "memory_key_gain": Field(False, "a learned gain in the norm of the memory's keys (of normed keys)", fixed=True),
}  # fmt: skip


class Injection(nnx.Module):
    """W_k, W_v and the gates of one layer. W starts as the token's own projections do, gates at 1."""

    def __init__(self, model, kv_width: int, *, rngs: nnx.Rngs):
        initializers, axes = jax.nn.initializers, ("embed", "heads")
        uniform = initializers.variance_scaling(1.0, "fan_in", "uniform")
        self.key = Linear(model.dim, kv_width, axes=axes, rngs=rngs, init=uniform)
        self.value = Linear(model.dim, kv_width, axes=axes, rngs=rngs, init=uniform)
        self.channels = min(model.gate_channels or model.dim, model.dim)
        gates = kv_width if model.gate == "channel" else kv_width // model.head_dim
        gate = partial(Linear, self.channels, gates, axes=axes, rngs=rngs, init=initializers.zeros)
        bias = model.memory_gate_bias
        self.local_gate = gate()
        self.memory_gate = gate(bias_init=None if bias is None else initializers.constant(bias))
        norm = lambda: RMSNorm(model.head_dim, rngs=rngs, eps=model.norm_eps, axes=(None,))
        self.key_norm = norm() if model.memory_key_gain else None
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        self.gate_input, self.mix_keys = model.gate_input, model.mix_keys

    def __call__(self, x_BTD, a_BTD, memory_BTD, k_BTGK, v_BTGK, *, finish: Callable, rotate: Callable):
        """The mixed keys, as attention takes them, and values.

        Args:
          x_BTD, a_BTD: the stream and the sublayer's normed input.
          memory_BTD: each token's memory, that of the position before.
          k_BTGK, v_BTGK: the token's own keys and values, keys as projected.
          finish: what makes a projected key one that attention takes: rotation, norm, scale.
          rotate: the same without the norm.
        """
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        source_BTD = a_BTD if self.gate_input == "normed" else x_BTD
        gate = lambda linear: self._gate(linear, source_BTD[..., : self.channels])
        local, memory = gate(self.local_gate), gate(self.memory_gate)
        memory_k_BTGK, memory_v_BTGK = heads(self.key(memory_BTD)), heads(self.value(memory_BTD))
        v_BTGK = local * v_BTGK + memory * memory_v_BTGK
        if self.mix_keys == "raw":
            return finish(local * k_BTGK + memory * memory_k_BTGK), v_BTGK
        norm = self.key_norm or (lambda y: rms_normalize(y, self.eps))
        return local * finish(k_BTGK) + memory * rotate(norm(memory_k_BTGK)), v_BTGK

    def _gate(self, linear: Linear, source_BTC):
        """[B,T,G,K], or [B,T,G,1] of gates a head."""
        g_BTN = 2 * jax.nn.sigmoid(linear(source_BTC))
        width = self.key.kernel.shape[-1]
        return g_BTN.reshape(*g_BTN.shape[:2], width // self.head_dim, -1)
