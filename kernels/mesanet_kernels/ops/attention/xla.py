"""Causal attention a block of queries at a time, in plain XLA: memory linear in T.

B batch, T time, N blocks, C queries of a block, S keys a block may see, H query heads, J key heads,
K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.chunks import pad_time
from mesanet_kernels.ops.attention.masked import masked_attention

BLOCK = 128


class Options(NamedTuple):
    window: int | None
    scale: float
    one_document: bool  # no segment_ids were given


def attention(options, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT):
    length, block = q_BTHK.shape[1], min(BLOCK, q_BTHK.shape[1])
    window = min(options.window or length, length)
    seen = min(length, window + block - 1)
    # Keys stay in the accumulation dtype outside the scan, so that their gradients are summed over blocks in it.
    dtype = accumulation_dtype(q_BTHK, k_BTJK, v_BTJV)
    wide_k_BTJK, wide_v_BTJV = k_BTJK.astype(dtype), v_BTJV.astype(dtype)

    @jax.checkpoint  # scores and softmax of one block at a time, in the backward pass too
    def attend(_, inputs):
        start, q_BCHK, segment_ids_BC = inputs
        first = jnp.clip(start + block - seen, 0, length - seen)

        def keys(x_BT):
            return jax.lax.dynamic_slice_in_dim(x_BT, first, seen, axis=1)

        age_CS = (start + jnp.arange(block))[:, None] - (first + jnp.arange(seen))
        same_BCS = segment_ids_BC[:, :, None] == keys(segment_ids_BT)[:, None, :]
        visible_BCS = same_BCS & (age_CS >= 0) & (age_CS < window)
        o_BCHV = masked_attention(
            q_BCHK,
            keys(wide_k_BTJK).astype(k_BTJK.dtype),
            keys(wide_v_BTJV).astype(v_BTJV.dtype),
            visible_BCS,
            scale=options.scale,
        )
        return None, o_BCHV.astype(v_BTJV.dtype)

    q_NBCHK = _blocks(q_BTHK, block)
    starts_N = block * jnp.arange(q_NBCHK.shape[0])
    _, o_NBCHV = jax.lax.scan(attend, None, (starts_N, q_NBCHK, _blocks(segment_ids_BT, block)))
    return jnp.moveaxis(o_NBCHV, 0, 1).reshape(*q_BTHK.shape[:1], -1, *o_NBCHV.shape[3:])[:, :length]


def _blocks(x_BT, block):
    """[B, T, ...] -> [N, B, C, ...]; padded queries are computed and dropped."""
    x_BT = pad_time(x_BT, chunk=block)
    batch, time, *rest = x_BT.shape
    return jnp.moveaxis(x_BT.reshape(batch, time // block, block, *rest), 1, 0)
