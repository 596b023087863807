"""Softmax attention of some queries over some keys under a mask: what training and decoding share.

B batch, C queries, S keys, J key heads, G queries a key head, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype

MASKED = -1e30  # exp() of it is exactly 0; not -inf, which makes NaN of a row that sees nothing (padding)


def masked_attention(q_BCHK, k_BSJK, v_BSJV, visible_BCS, *, scale):
    """o [B, C, H, V] in the accumulation dtype; scores and softmax too. A masked pair has weight exactly 0.

    Args:
      q_BCHK: query head h belongs to key head h // (H / J).
      visible_BCS: bool, what a query may see; a batch of 1 serves all.
    """
    dtype = accumulation_dtype(q_BCHK, k_BSJK, v_BSJV)
    batch, queries, heads, key_size = q_BCHK.shape
    key_heads = k_BSJK.shape[2]
    q_BCJGK = q_BCHK.reshape(batch, queries, key_heads, heads // key_heads, key_size)
    scores_BJGCS = scale * _matmul("bcjgk,bsjk->bjgcs", q_BCJGK, k_BSJK, dtype)
    scores_BJGCS = jnp.where(visible_BCS[:, None, None], scores_BJGCS, MASKED)
    weights_BJGCS = jnp.exp(scores_BJGCS - jax.lax.stop_gradient(jnp.max(scores_BJGCS, axis=-1, keepdims=True)))
    total_BCJG = jnp.moveaxis(jnp.sum(weights_BJGCS, axis=-1), -1, 1)
    sums_BCJGV = _matmul("bjgcs,bsjv->bcjgv", weights_BJGCS.astype(v_BSJV.dtype), v_BSJV, dtype)
    return (sums_BCJGV / total_BCJG[..., None]).reshape(batch, queries, heads, -1)


def _matmul(equation, a, b, dtype):
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
