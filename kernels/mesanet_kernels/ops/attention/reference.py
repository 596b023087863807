"""Causal attention as it is defined: all scores at once.

B batch, T time, S keys, H query heads, J key heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.ops.attention.xla import AttentionOptions


def attention_reference(options: AttentionOptions, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT) -> jax.Array:
    """Computes `api.attention`."""
    length = q_BTHK.shape[1]
    age_TT = jnp.arange(length)[:, None] - jnp.arange(length)
    visible_TT = (age_TT >= 0) & (age_TT < (options.window or length))
    visible_BTT = visible_TT & (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :])
    return attend_visible(q_BTHK, k_BTJK, v_BTJV, visible_BTT, scale=options.scale).astype(v_BTJV.dtype)


def attend_visible(q_BTHK, k_BSJK, v_BSJV, visible_BTS, *, scale: float) -> jax.Array:
    """Returns o [B, T, H, V] in the accumulation dtype: softmax attention over the keys that each query may see.

    Takes the arguments of `masked.masked_attention`.
    """
    dtype = accumulation_dtype(q_BTHK, k_BSJK, v_BSJV)
    groups = q_BTHK.shape[2] // k_BSJK.shape[2]
    k_BSHK, v_BSHV = (jnp.repeat(x.astype(dtype), groups, axis=2) for x in (k_BSJK, v_BSJV))
    scores_BHTS = scale * jnp.einsum(
        "bthk,bshk->bhts", q_BTHK.astype(dtype), k_BSHK, precision=jax.lax.Precision.HIGHEST
    )
    probs_BHTS = jax.nn.softmax(jnp.where(visible_BTS[:, None], scores_BHTS, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshv->bthv", probs_BHTS, v_BSHV, precision=jax.lax.Precision.HIGHEST)
