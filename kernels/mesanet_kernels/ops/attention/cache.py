"""Decoding with attention: a ring buffer of the last S keys and values.

The token at position p is stored in slot p % S, so a window of S tokens takes the same memory however long the text is.

B batch, T new tokens, S slots, H query heads, J key heads, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mesanet_kernels import checks, dispatch
from mesanet_kernels.ops.attention.masked import masked_attention
from mesanet_kernels.ops.attention.reference import attend_visible

CACHED_IMPLEMENTATIONS = {"reference": attend_visible, "xla": masked_attention}


class AttentionState(NamedTuple):
    """The keys and values of the last S tokens, in a ring buffer.

    Attributes:
      keys: [B, S, J, K].
      values: [B, S, J, V].
      positions: int32 [S], the position in the text of the token in each slot; -1 if the slot is empty.
      next_position: int32 scalar, the position of the next token.
    """

    keys: jax.Array
    values: jax.Array
    positions: jax.Array
    next_position: jax.Array


def init_attention_state(
    batch: int, kv_heads: int, size: int, head_dim: int, v_dim: int, dtype: DTypeLike
) -> AttentionState:
    """Returns an empty state with `size` slots.

    Args:
      size: the length of the longest text, or the window if that is smaller.
      head_dim: the key size K.
      v_dim: the value size V.
      dtype: the dtype of the stored keys and values.
    """
    return AttentionState(
        keys=jnp.zeros((batch, size, kv_heads, head_dim), dtype),
        values=jnp.zeros((batch, size, kv_heads, v_dim), dtype),
        positions=jnp.full((size,), -1, jnp.int32),
        next_position=jnp.zeros((), jnp.int32),
    )


def attention_extend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: AttentionState,
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, AttentionState]:
    """Computes `attention` for the next T tokens of a text whose earlier keys and values are in `state`.

    A token sees itself and the `window` - 1 tokens before it, but never more than S tokens, the number of slots
    of the state. A state with fewer slots than the text has tokens therefore acts as a window.

    Args:
      q: [B, T, H, K], where H is a multiple of J. T may exceed S.
      k: [B, T, J, K].
      v: [B, T, J, V].
      state: from `init_attention_state` or an earlier call.
      window, scale: as in `attention`.
      implementation: "reference", "xla", or None for "xla".

    Returns:
      (o [B, T, H, V] in the dtype of v, the new state).

    Raises:
      ValueError: a shape or the window is wrong.
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


def attention_step(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    state: AttentionState,
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, AttentionState]:
    """Computes `attention_extend` for one token, without copying the state.

    Args:
      q: [B, H, K].
      k: [B, J, K].
      v: [B, J, V].
      state, window, scale, implementation: as in `attention_extend`.

    Returns:
      (o [B, H, V] in the dtype of v, the new state).

    Raises:
      ValueError, NotImplementedError: as `attention_extend`.
    """
    attend = dispatch.choose("attention_step", implementation, CACHED_IMPLEMENTATIONS, default=masked_attention)
    _check("attention_step", "BHK", "BJK", "BJV", q, k, v, state, window)
    q, k, v = (x[:, None] for x in (q, k, v))
    position_1 = state.next_position[None]
    state = _store(state, k, v, position_1)
    visible_11S = _visible(position_1, state.positions, window, state.positions.shape[0])
    o = attend(q, state.keys.astype(k.dtype), state.values.astype(v.dtype), visible_11S, scale=default_scale(q, scale))
    return o[:, 0].astype(v.dtype), state


def default_scale(q: jax.Array, scale: float | None) -> float:
    """Returns `scale`, or 1 / sqrt(K) if it is None."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def _visible(query_positions_T, key_positions_S, window: int | None, size: int) -> jax.Array:
    """Returns bool [1, T, S]: whether the query at one position may see the key at another."""
    age_TS = query_positions_T[:, None] - key_positions_S
    return ((key_positions_S >= 0) & (age_TS >= 0) & (age_TS < min(window or size, size)))[None]


def _store(state: AttentionState, k_BTJK, v_BTJV, positions_T) -> AttentionState:
    """Returns the state with the new tokens in their slots.

    Only the last S tokens are written, because they would overwrite earlier ones.
    """
    size = state.positions.shape[0]
    kept_T = positions_T[-size:]
    slots_T = kept_T % size
    return AttentionState(
        keys=state.keys.at[:, slots_T].set(k_BTJK[:, -size:].astype(state.keys.dtype)),
        values=state.values.at[:, slots_T].set(v_BTJV[:, -size:].astype(state.values.dtype)),
        positions=state.positions.at[slots_T].set(kept_T),
        next_position=positions_T[-1] + 1,
    )


def _check(op: str, q_axes: str, k_axes: str, v_axes: str, q, k, v, state: AttentionState, window) -> None:
    """Raises ValueError if a shape or the window is wrong."""
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
