"""Causal attention as it is defined, all scores at once.

B batch, T time, H query heads = J key heads x G queries a key head, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype


def attention(options, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT):
    dtype = accumulation_dtype(q_BTHK, k_BTJK, v_BTJV)
    groups, length = q_BTHK.shape[2] // k_BTJK.shape[2], q_BTHK.shape[1]
    k_BTHK, v_BTHV = (jnp.repeat(x.astype(dtype), groups, axis=2) for x in (k_BTJK, v_BTJV))
    age_TT = jnp.arange(length)[:, None] - jnp.arange(length)
    visible_TT = (age_TT >= 0) & (age_TT < (options.window or length))
    visible_B1TT = (visible_TT & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]))[:, None]
    scores_BHTT = options.scale * jnp.einsum(
        "bthk,bshk->bhts", q_BTHK.astype(dtype), k_BTHK, precision=jax.lax.Precision.HIGHEST
    )
    probs_BHTT = jax.nn.softmax(jnp.where(visible_B1TT, scores_BHTT, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", probs_BHTT, v_BTHV, precision=jax.lax.Precision.HIGHEST).astype(v_BTJV.dtype)
