"""Causal softmax attention with rotary positions, full or in a sliding window, heads optionally grouped.

B batch, T time, D model width, H query heads, G key/value heads, K head size, S cache slots.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, mean_context, products
from mesanet_jax.layers import Linear, fan_in_normal, l2_normalize, param, rotary
from mesanet_jax.schema import Field
from mesanet_kernels import attention, attention_extend, attention_step, init_attention_state


class Attention(nnx.Module):
    """The softmax baseline of the MesaNet paper (section 4): multi-head attention, RoPE, no biases."""

    SECTION = "attention"
    FIELDS = {
        "kv_heads": Field(
            None, "key/value heads, a divisor of model.heads; none: one a query head", kind=int, at_least=1, fixed=True
        ),
        "rope_base": Field(
            10_000.0, "base of the rotary frequencies; the paper does not state its own", above=1.0, fixed=True
        ),
        "window": Field(None, "tokens that a token sees, itself included; none: all", kind=int, at_least=1, fixed=True),
        "implementation": Field(
            None,
            "attention backend of the kernel library; none: the best that applies",
            kind=str,
            choices=("reference", "xla", "cudnn"),
        ),
        "cosine": Field(
            False,
            "scaled cosine attention: unit queries and keys, a learned temperature a head in place of 1 / sqrt(head_dim)",
            fixed=True,
        ),
        "temperature_init": Field(10.0, "initial factor on cosines (Swin V2)", above=0.0, fixed=True),
        "temperature_max": Field(100.0, "its upper bound (Swin V2)", above=0.0, fixed=True),
    }

    @classmethod
    def check(cls, model) -> None:
        kv_heads = model[cls.SECTION].kv_heads or model.heads
        if model.heads % kv_heads:
            raise UserError(
                f"config.model.{cls.SECTION}.kv_heads={kv_heads}: must divide config.model.heads={model.heads}"
            )
        if model.head_dim % 2:
            raise UserError(f"config.model.head_dim={model.head_dim}: rotary positions need an even size")
        start, most = model[cls.SECTION].temperature_init, model[cls.SECTION].temperature_max
        if start >= most:  # beyond the bound there is no gradient
            raise UserError(
                f"config.model.{cls.SECTION}.temperature_init={start}: must be below temperature_max={most}"
            )

    def __init__(self, model, *, rngs: nnx.Rngs):
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
        self.scale = 1.0 if options.cosine else None  # of the scores; None: 1 / sqrt(K)
        out_init = fan_in_normal(model.residual_init_scale / model.layers)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=out_init)

    def _project(self, x_BTD, positions_T):
        """Rotated queries [B,T,H,K] and keys [B,T,G,K], values [B,T,G,K]."""
        batch, time, _ = x_BTD.shape
        q_BTHK = self.query(x_BTD).reshape(batch, time, self.heads, self.head_dim)
        k_BTGK = self.key(x_BTD).reshape(batch, time, self.kv_heads, self.head_dim)
        v_BTGK = self.value(x_BTD).reshape(batch, time, self.kv_heads, self.head_dim)
        if self.log_temperature is not None:
            q_BTHK, k_BTGK = self._tempered(q_BTHK), l2_normalize(k_BTGK)
        rotate = lambda x: rotary(x, positions_T, base=self.rope_base)
        return rotate(q_BTHK), rotate(k_BTGK), v_BTGK

    def _tempered(self, q_BTHK):
        """Unit queries times their heads' temperatures exp(min(s, ln max)) (Swin V2, arXiv 2111.09883, section 3.2): what
        any attention kernel without a scale then computes is scaled cosine attention, as rotations keep lengths."""
        log_bound = math.log(self.max_temperature)
        temperature_H1 = jnp.exp(jnp.minimum(self.log_temperature[...], log_bound))[:, None]
        return (l2_normalize(q_BTHK.astype(jnp.float32)) * temperature_H1).astype(q_BTHK.dtype)

    def _merge(self, o_BTHK):
        return self.out(o_BTHK.reshape(*o_BTHK.shape[:-2], -1))

    def __call__(self, x_BTD, segment_ids_BT):
        # Rotary scores depend on the distance of two tokens alone, so positions need not restart in a document.
        q_BTHK, k_BTGK, v_BTGK = self._project(x_BTD, jnp.arange(x_BTD.shape[1]))
        o_BTHK = attention(
            q_BTHK, k_BTGK, v_BTGK,
            window=self.window, scale=self.scale, segment_ids=segment_ids_BT, implementation=self.implementation,
        )  # fmt: skip
        return self._merge(o_BTHK)

    def init_state(self, batch: int, *, max_length: int, dtype):
        """A cache of `max_length` tokens, or of the window where that is shorter."""
        slots = min(max_length, self.window or max_length)
        return init_attention_state(batch, self.kv_heads, slots, self.head_dim, self.head_dim, dtype)

    def extend(self, x_BTD, state):
        positions_T = state.next_position + jnp.arange(x_BTD.shape[1])
        q_BTHK, k_BTGK, v_BTGK = self._project(x_BTD, positions_T)
        o_BTHK, state = attention_extend(q_BTHK, k_BTGK, v_BTGK, state, window=self.window, scale=self.scale)
        return self._merge(o_BTHK), state

    def decode_step(self, x_BD, state):
        q_BTHK, k_BTGK, v_BTGK = self._project(x_BD[:, None], state.next_position[None])
        o_BHK, state = attention_step(
            q_BTHK[:, 0], k_BTGK[:, 0], v_BTGK[:, 0], state, window=self.window, scale=self.scale
        )
        return self._merge(o_BHK), state

    def flops_per_token(self, seq_len: int) -> Flops:
        """Projections, and QK^T and AV over the mean causal context."""
        dim, width, kv_width = self.out.kernel.shape[-1], self.heads * self.head_dim, self.kv_heads * self.head_dim
        return products(2 * dim * (2 * width + 2 * kv_width) + 4 * width * mean_context(seq_len, self.window))
