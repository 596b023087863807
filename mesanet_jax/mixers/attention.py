"""Causal softmax attention with rotary positions: full or in a sliding window, with as many key/value heads or fewer.

B batch, T time, D model width, H query heads, G key/value heads, K head size.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, mean_context, products
from mesanet_jax.layers import Linear, fan_in_normal, l2_normalize, param, rotary
from mesanet_jax.mixers.backends import for_other_ops, implementation_field
from mesanet_jax.schema import Config, Field
from mesanet_kernels import AttentionState, attention, attention_extend, attention_step, init_attention_state


class Attention(nnx.Module):
    """Multi-head attention with rotary positions and no biases: the softmax baseline of MesaNet (section 4)."""

    SECTION = "attention"
    FIELDS = {
        "kv_heads": Field(
            None,
            "key/value heads, a divisor of model.heads; none: one for each query head",
            kind=int,
            at_least=1,
            fixed=True,
        ),
        "rope_base": Field(
            10_000.0,
            "base of the rotary frequencies (MesaNet does not state the one it used)",
            above=1.0,
            fixed=True,
        ),
        "window": Field(
            None,
            "number of tokens that a token attends to, itself included; none: all up to itself",
            kind=int,
            at_least=1,
            fixed=True,
        ),
        "implementation": implementation_field("attention"),
        "cosine": Field(
            False,
            "scaled cosine attention: unit queries and keys, and a learned temperature per head instead of "
            "1 / sqrt(head_dim)",
            fixed=True,
        ),
        "temperature_init": Field(
            10.0,
            "cosine: initial temperature, the factor on the cosines (as in Swin V2)",
            above=0.0,
            fixed=True,
        ),
        "temperature_max": Field(
            100.0,
            "cosine: upper bound of the temperature (as in Swin V2)",
            above=0.0,
            fixed=True,
        ),
    }

    @classmethod
    def check(cls, model: Config) -> None:
        """Raises UserError for options that do not fit together."""
        options = model[cls.SECTION]
        section, kv_heads = f"config.model.{cls.SECTION}", options.kv_heads or model.heads
        if model.heads % kv_heads:
            raise UserError(f"{section}.kv_heads={kv_heads}: must divide config.model.heads={model.heads}")
        if model.head_dim % 2:
            raise UserError(f"config.model.head_dim={model.head_dim}: rotary positions need an even size")
        # At the bound the temperature has no gradient.
        if options.temperature_init >= options.temperature_max:
            raise UserError(
                f"{section}.temperature_init={options.temperature_init}: "
                f"must be below temperature_max={options.temperature_max}"
            )

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        options = model[self.SECTION]
        self.heads, self.head_dim = model.heads, model.head_dim
        self.kv_heads = options.kv_heads or model.heads
        self.rope_base, self.window, self.implementation = options.rope_base, options.window, options.implementation
        width, kv_width = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.query = Linear(model.dim, width, axes=("embed", "heads"), rngs=rngs)
        self.key = Linear(model.dim, kv_width, axes=("embed", "heads"), rngs=rngs)
        self.value = Linear(model.dim, kv_width, axes=("embed", "heads"), rngs=rngs)
        log_init = jax.nn.initializers.constant(math.log(options.temperature_init))
        self.log_temperature = param(rngs, log_init, (self.heads,), ("heads",)) if options.cosine else None
        self.max_temperature = options.temperature_max
        self.scale = 1.0 if options.cosine else None  # factor on the scores; None: 1 / sqrt(K)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _project(self, x_BTD: jax.Array, positions_T: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns rotated queries [B, T, H, K] and keys [B, T, G, K], and values [B, T, G, K]."""
        batch, time, _ = x_BTD.shape
        q_BTHK = self.query(x_BTD).reshape(batch, time, self.heads, self.head_dim)
        k_BTGK = self.key(x_BTD).reshape(batch, time, self.kv_heads, self.head_dim)
        v_BTGK = self.value(x_BTD).reshape(batch, time, self.kv_heads, self.head_dim)
        if self.log_temperature is not None:
            q_BTHK, k_BTGK = self._apply_temperature(q_BTHK, self.log_temperature[...]), l2_normalize(k_BTGK)
        rotate = lambda x: rotary(x, positions_T, base=self.rope_base)
        return rotate(q_BTHK), rotate(k_BTGK), v_BTGK

    def _apply_temperature(self, q_BTHK: jax.Array, log_temperature_H: jax.Array) -> jax.Array:
        """Returns unit queries times the temperature exp(min(s, ln max)) of their head.

        Swin V2 (arXiv 2111.09883, section 3.2). Rotations keep lengths, so any attention kernel that does not scale
        the scores then computes scaled cosine attention.
        """
        temperature_H1 = jnp.exp(jnp.minimum(log_temperature_H, math.log(self.max_temperature)))[:, None]
        return (l2_normalize(q_BTHK.astype(jnp.float32)) * temperature_H1).astype(q_BTHK.dtype)

    def _merge(self, o_BTHK: jax.Array) -> jax.Array:
        return self.out(o_BTHK.reshape(*o_BTHK.shape[:-2], -1))

    def __call__(self, x_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        # Rotary scores depend only on the distance of two tokens, so positions need not restart with each document.
        o_BTHK = attention(
            *self._project(x_BTD, jnp.arange(x_BTD.shape[1])),
            window=self.window,
            scale=self.scale,
            segment_ids=segment_ids_BT,
            implementation=self.implementation,
        )
        return self._merge(o_BTHK)

    def init_state(self, batch: int, *, max_length: int, dtype: jax.typing.DTypeLike) -> AttentionState:
        """Returns an empty cache of `max_length` tokens, or of the window if it is shorter."""
        slots = min(max_length, self.window or max_length)
        return init_attention_state(batch, self.kv_heads, slots, self.head_dim, self.head_dim, dtype)

    def _cached_options(self) -> dict[str, object]:
        return {
            "window": self.window,
            "scale": self.scale,
            "implementation": for_other_ops(self.implementation),  # cuDNN has no attention over a cache
        }

    def extend(self, x_BTD: jax.Array, state: AttentionState) -> tuple[jax.Array, AttentionState]:
        positions_T = state.next_position + jnp.arange(x_BTD.shape[1])
        o_BTHK, state = attention_extend(*self._project(x_BTD, positions_T), state, **self._cached_options())
        return self._merge(o_BTHK), state

    def decode_step(self, x_BD: jax.Array, state: AttentionState) -> tuple[jax.Array, AttentionState]:
        q_B1HK, k_B1GK, v_B1GK = self._project(x_BD[:, None], state.next_position[None])
        o_BHK, state = attention_step(q_B1HK[:, 0], k_B1GK[:, 0], v_B1GK[:, 0], state, **self._cached_options())
        return self._merge(o_BHK), state

    def flops_per_token(self, seq_len: int) -> Flops:
        """Counts the projections, and the two products of the scores over the mean causal context."""
        dim, width, kv_width = self.out.kernel.shape[-1], self.heads * self.head_dim, self.kv_heads * self.head_dim
        return products(2 * dim * (2 * width + 2 * kv_width) + 4 * width * mean_context(seq_len, self.window))
