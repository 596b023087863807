"""Causal attention a block of queries at a time, in plain XLA: memory linear in T.

B batch, T time, L keys and values, N blocks, C queries of a block, S keys a block may see, H query heads, J key heads,
K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.chunks import pad_time
from mesanet_kernels.ops.attention.masked import masked_attention

BLOCK = 128


class AttentionOptions(NamedTuple):
    window: int | None
    scale: float
    one_document: bool  # no segment_ids were given


def attention_xla(options, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT):
    return attend(options, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT, segment_ids_BT, start=0)


def attend(options, q_BTHK, k_BLJK, v_BLJV, segment_ids_BT, key_segment_ids_BL, *, start):
    """The queries are those at `start`, `start` + 1, ... of the L tokens; it may be traced."""
    length, block = k_BLJK.shape[1], min(BLOCK, q_BTHK.shape[1])
    window = min(options.window or length, length)
    seen = min(length, window + block - 1)
    # Keys stay in the accumulation dtype outside the scan, so that their gradients are summed over blocks in it.
    dtype = accumulation_dtype(q_BTHK, k_BLJK, v_BLJV)
    wide_k_BLJK, wide_v_BLJV = k_BLJK.astype(dtype), v_BLJV.astype(dtype)

    @jax.checkpoint  # scores and softmax of one block at a time, in the backward pass too
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


def _blocks(x_BT, block):
    """[B, T, ...] -> [N, B, C, ...]; padded queries are computed and dropped."""
    x_BT = pad_time(x_BT, chunk=block)
    batch, time, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(batch, time // block, block, *rest), 1, 0)
