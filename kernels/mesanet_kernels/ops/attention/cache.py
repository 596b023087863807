"""Decoding with attention: a ring of the last S keys and values.

The token at position p lives in slot p % S, so that a window of S needs no more room however long the text.

B batch, T new tokens, S slots, H query heads, J key heads, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels import checks, dispatch
from mesanet_kernels.ops.attention.masked import masked_attention
from mesanet_kernels.ops.attention.reference import attend_visible

CACHED_IMPLEMENTATIONS = {"reference": attend_visible, "xla": masked_attention}


class AttentionState(NamedTuple):
    """keys [B,S,J,K] and values [B,S,J,V]; positions int32 [S], -1 where empty; next_position int32 scalar."""

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    next_position: jax.Array


def init_attention_state(batch, kv_heads, size, head_dim, v_dim, dtype) -> AttentionState:
    """An empty state of `size` slots: the longest text, or the window, whichever is less."""
    return AttentionState(
        keys=jnp.zeros((batch, size, kv_heads, head_dim), dtype),
        values=jnp.zeros((batch, size, kv_heads, v_dim), dtype),
        positions=jnp.full((size,), -1, jnp.int32),
        next_position=jnp.zeros((), jnp.int32),
    )


def attention_extend(q, k, v, state, *, window=None, scale=None, implementation=None):
    """`attention` over T more tokens of a text whose earlier keys and values are in `state`.

    A token sees itself and the earlier ones: the last `window`, and never more than S, the state's size
    (a state of fewer slots than the text is a window).

    Args:
      q: [B, T, H, K]; k: [B, T, J, K]; v: [B, T, J, V], H % J == 0. T may exceed S.
      state: from `init_attention_state` or an earlier call.
      window, scale: as in `attention`.
      implementation: "reference", "xla", or None for "xla".

    Returns:
      (o [B, T, H, V] in v's dtype, new state).

    Raises:
      ValueError: shapes that do not fit.
      NotImplementedError: there is no such implementation.
    """
    attend = dispatch.choose("attention_extend", implementation, CACHED_IMPLEMENTATIONS, default=masked_attention)
    _check("attention_extend", "BTHK", "BTJK", "BTJV", q, k, v, state, window)
    length, size = q.shape[1], state.positions.shape[0]
    positions_T = state.next_position + jnp.arange(length, dtype=jnp.int32)
    seen_positions_S = jnp.concatenate([state.positions, positions_T])
    seen_k, seen_v = (
        jnp.concatenate([old, new.astype(old.dtype)], axis=1) for old, new in ((state.keys, k), (state.values, v))
    )
    visible_1TS = _visible(positions_T, seen_positions_S, window, size)
    o = attend(q, seen_k.astype(k.dtype), seen_v.astype(v.dtype), visible_1TS, scale=default_scale(q, scale))
    return o.astype(v.dtype), _store(state, k, v, positions_T)


def attention_step(q, k, v, state, *, window=None, scale=None, implementation=None):
    """One token of `attention_extend`, without a copy of the state: q [B,H,K], k [B,J,K], v [B,J,V].

    Returns:
      (o [B, H, V] in v's dtype, new state).
    """
    attend = dispatch.choose("attention_step", implementation, CACHED_IMPLEMENTATIONS, default=masked_attention)
    _check("attention_step", "BHK", "BJK", "BJV", q, k, v, state, window)
    q, k, v = (x[:, None] for x in (q, k, v))
    position_1 = state.next_position[None]
    state = _store(state, k, v, position_1)
    visible_11S = _visible(position_1, state.positions, window, state.positions.shape[0])
    o = attend(q, state.keys.astype(k.dtype), state.values.astype(v.dtype), visible_11S, scale=default_scale(q, scale))
    return o[:, 0].astype(v.dtype), state


def default_scale(q, scale):
    """1 / sqrt(K) unless given."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def _visible(query_positions_T, key_positions_S, window, size):
    age_TS = query_positions_T[:, None] - key_positions_S
    return ((key_positions_S >= 0) & (age_TS >= 0) & (age_TS < min(window or size, size)))[None]


def _store(state, k_BTJK, v_BTJV, positions_T):
    """The state with the last S of the new tokens in their slots (the earlier ones would be overwritten)."""
    size = state.positions.shape[0]
    kept_T = positions_T[-size:]
    slots_T = kept_T % size
    return AttentionState(
        keys=state.keys.at[:, slots_T].set(k_BTJK[:, -size:].astype(state.keys.dtype)),
        values=state.values.at[:, slots_T].set(v_BTJV[:, -size:].astype(state.values.dtype)),
        positions=state.positions.at[slots_T].set(kept_T),
        next_position=positions_T[-1] + 1,
    )


def _check(op, q_axes, k_axes, v_axes, q, k, v, state, window):
    sizes = checks.check_shapes(
        op,
        {
            "q": (q, q_axes),
            "k": (k, k_axes),
            "v": (v, v_axes),
            "state.keys": (state.keys, "BSJK"),
            "state.values": (state.values, "BSJV"),
            "state.positions": (state.positions, "S"),
        },
    )
    checks.check_groups(op, sizes)
    checks.check_positive(op, window=window)
