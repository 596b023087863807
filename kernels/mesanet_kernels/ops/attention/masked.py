"""Softmax attention of some queries over some keys under a mask, for training and decoding.

B batch, C queries, S keys, H query heads, J key heads, G query heads per key head, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype

# The score of a masked pair. Its exponential is exactly 0. It is not -inf, because a query that sees no key (padding)
# would then give NaN.
MASKED = -1e30


def masked_attention(q_BCHK, k_BSJK, v_BSJV, visible_BCS, *, scale: float) -> jax.Array:
    """Returns o [B, C, H, V] in the accumulation dtype, in which scores and softmax are computed too.

    A masked pair has a weight of exactly 0.

    Args:
      q_BCHK: queries; query head h reads key head h // (H / J).
      k_BSJK: keys.
      v_BSJV: values.
      visible_BCS: bool, the keys that each query may see. A first axis of size 1 applies to every row.
      scale: the factor applied to the scores.
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
