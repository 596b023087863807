"""Causal attention in plain XLA, computed for one block of queries at a time, so that memory is linear in T.

B batch, T queries, L keys, N blocks, C queries of a block, S keys that a block may see, H query heads, J key heads,
K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.chunks import pad_time
from mesanet_kernels.ops.attention.masked import masked_attention

BLOCK = 128  # queries per block


class AttentionOptions(NamedTuple):
    """The static settings of one call of `attention`.

    Attributes:
      window: the number of tokens that a token sees, itself included; None for all earlier tokens.
      scale: the factor applied to the scores.
      one_document: whether each row is one document, because no segment_ids were given.
    """

    window: int | None
    scale: float
    one_document: bool


def attention_xla(options: AttentionOptions, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT) -> jax.Array:
    """Computes `api.attention`, for rows that are not split over devices along time."""
    return attend(options, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT, segment_ids_BT, start=0)


def attend(
    options: AttentionOptions,
    q_BTHK,
    k_BLJK,
    v_BLJV,
    segment_ids_BT,
    key_segment_ids_BL,
    *,
    start: int | jax.Array,
) -> jax.Array:
    """Returns o [B, T, H, V] of the T queries that belong to tokens `start`, `start` + 1, ... of the L tokens.

    Args:
      segment_ids_BT: the document of each query.
      key_segment_ids_BL: the document of each key.
      start: may be traced.
    """
    length, block = k_BLJK.shape[1], min(BLOCK, q_BTHK.shape[1])
    window = min(options.window or length, length)
    seen = min(length, window + block - 1)
    # Outside the scan, keys and values have the accumulation dtype, so that their gradients are summed in it.
    dtype = accumulation_dtype(q_BTHK, k_BLJK, v_BLJV)
    wide_k_BLJK, wide_v_BLJV = k_BLJK.astype(dtype), v_BLJV.astype(dtype)

    @jax.checkpoint  # so that the backward pass, too, holds the scores of one block only
    def attend_block(_, inputs):
        begin, q_BCHK, segment_ids_BC = inputs
        first = jnp.clip(begin + block - seen, 0, length - seen)

        def keys(x_BL):
            return jax.lax.dynamic_slice_in_dim(x_BL, first, seen, axis=1)

        age_CS = (begin + jnp.arange(block))[:, None] - (first + jnp.arange(seen))
        same_BCS = segment_ids_BC[:, :, None] == keys(key_segment_ids_BL)[:, None, :]
        visible_BCS = same_BCS & (age_CS >= 0) & (age_CS < window)
        o_BCHV = masked_attention(
            q_BCHK,
            keys(wide_k_BLJK).astype(k_BLJK.dtype),
            keys(wide_v_BLJV).astype(v_BLJV.dtype),
            visible_BCS,
            scale=options.scale,
        )
        return None, o_BCHV.astype(v_BLJV.dtype)

    q_NBCHK = _blocks(q_BTHK, block)
    begins_N = start + block * jnp.arange(q_NBCHK.shape[0])
    _, o_NBCHV = jax.lax.scan(attend_block, None, (begins_N, q_NBCHK, _blocks(segment_ids_BT, block)))
    return jnp.moveaxis(o_NBCHV, 0, 1).reshape(*q_BTHK.shape[:1], -1, *o_NBCHV.shape[3:])[:, : q_BTHK.shape[1]]


def _blocks(x_BT: jax.Array, block: int) -> jax.Array:
    """Reshapes [B, T, ...] to [N, B, C, ...], padding T. Padded queries are computed and their results dropped."""
    x_BT = pad_time(x_BT, chunk=block)
    batch, time, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(batch, time // block, block, *rest), 1, 0)
