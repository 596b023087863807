"""A memory read through attention's keys and values: they are mixed with projections of the memory m.

    k = g_local k + g_memory W_k m,    v = g_local v + g_memory W_v m,    g = 2 sigmoid(G a)

(Maglev, arXiv 2608.02870, Eq. 6-8; LRT, arXiv 2605.26797.) The mixed keys and values are what a cache holds, so a cache
needs no more room than without a memory.

B batch, T time, D model width, G key/value heads, K head size, C channels that gates read, N gates per token.
"""

from collections.abc import Callable
from functools import partial

import jax
from flax import nnx

from mesanet_jax.layers import Linear, RMSNorm, rms_normalize
from mesanet_jax.schema import Config, Field


def injection_fields(*, gate_channels: int | None, mix_keys: str) -> dict[str, Field]:
    """The config fields of the injection; the arguments are defaults, which differ between Maglev and LRT.

    Maglev's text leaves most of these choices open. Its Eq. 8 says "elementwise", which fits both kinds of gate. With
    one gate per channel of rotated keys, scores depend on the absolute positions of two tokens, not only on their
    distance; with one gate per head, as in LRT's code, they do not.
    """
    return {
        "gate": Field(
            "head",
            "gates of the mix: one per channel of keys and values, or one per key/value head",
            choices=("channel", "head"),
            fixed=True,
        ),
        "gate_input": Field(
            "normed",
            "what the gates read: the normed input of the attention sublayer, or the stream itself",
            choices=("normed", "stream"),
            fixed=True,
        ),
        "gate_channels": Field(
            gate_channels,
            "the gates read this many of the first channels of their input; none: all",
            kind=int,
            at_least=1,
            fixed=True,
        ),
        "memory_gate_bias": Field(
            None,
            "initial bias b of the memory's gate, which then starts at 2 sigmoid(b); none: no bias, and a start at 1",
            kind=float,
            fixed=True,
        ),
        "mix_keys": Field(
            mix_keys,
            "mix keys after rotating and norming each (normed), or before both (raw)",
            choices=("normed", "raw"),
            fixed=True,
        ),
        "memory_key_gain": Field(
            False, "give the norm of the memory's keys a learned gain (only if mix_keys=normed)", fixed=True
        ),
    }


class Injection(nnx.Module):
    """W_k, W_v and the gates of one layer. W starts like the token's own projections, and the gates start at 1."""

    def __init__(self, model: Config, kv_width: int, *, rngs: nnx.Rngs):
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
        norm = partial(RMSNorm, model.head_dim, rngs=rngs, eps=model.norm_eps, axes=(None,))
        self.key_norm = norm() if model.memory_key_gain else None
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        self.gate_input, self.mix_keys = model.gate_input, model.mix_keys

    def __call__(
        self,
        x_BTD: jax.Array,
        a_BTD: jax.Array,
        memory_BTD: jax.Array,
        k_BTGK: jax.Array,
        v_BTGK: jax.Array,
        *,
        finish: Callable[[jax.Array], jax.Array],
        rotate: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array]:
        """The mixed keys, ready for attention, and the mixed values.

        Args:
          x_BTD, a_BTD: the stream, and the normed input of the sublayer.
          memory_BTD: the memory that each position reads.
          k_BTGK, v_BTGK: the token's own keys and values, as projected.
          finish: makes projected keys ready for attention: rotation, norm and scale.
          rotate: the same without the norm.
        """
        source_BTC = (a_BTD if self.gate_input == "normed" else x_BTD)[..., : self.channels]
        local, memory = self._gate(self.local_gate, source_BTC), self._gate(self.memory_gate, source_BTC)
        memory_k_BTGK, memory_v_BTGK = self._heads(self.key(memory_BTD)), self._heads(self.value(memory_BTD))
        v_BTGK = local * v_BTGK + memory * memory_v_BTGK
        if self.mix_keys == "raw":
            return finish(local * k_BTGK + memory * memory_k_BTGK), v_BTGK
        return local * finish(k_BTGK) + memory * rotate(self._norm(memory_k_BTGK)), v_BTGK

    def _heads(self, y_BTW):
        return y_BTW.reshape(*y_BTW.shape[:2], -1, self.head_dim)

    def _norm(self, k_BTGK):
        return rms_normalize(k_BTGK, self.eps) if self.key_norm is None else self.key_norm(k_BTGK)

    def _gate(self, linear: Linear, source_BTC):
        """[B,T,G,K] with one gate per channel, [B,T,G,1] with one per head."""
        g_BTN = 2 * jax.nn.sigmoid(linear(source_BTC))
        width = self.key.kernel.shape[-1]
        return g_BTN.reshape(*g_BTN.shape[:2], width // self.head_dim, -1)
