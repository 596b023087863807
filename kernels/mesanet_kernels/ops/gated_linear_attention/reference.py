"""Gated linear attention as it is defined: a scan over tokens, differentiated automatically.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens


def gated_linear_attention_reference(
    chunk, q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, state_BHKV, segment_ids_BT
):
    """Returns (o [B, T, H, V], final state [B, H, K, V]) with the arguments of `api.gated_linear_attention`.

    `log_decay` is [B, T, H] or [B, T, H, K]. `chunk` is ignored.
    """
    del chunk
    dtype = accumulation_dtype(q_BTHK, k_BTHK, v_BTHV)
    if log_decay_BTHK.ndim == 3:
        log_decay_BTHK = log_decay_BTHK[..., None]

    def update(state_BHKV, token):
        q_BHK, k_BHK, v_BHV, log_decay_BHK, beta_BH = token
        key_BHK1 = (beta_BH[..., None] * k_BHK)[..., None]
        state_BHKV = jnp.exp(log_decay_BHK)[..., None] * state_BHKV + key_BHK1 * v_BHV[..., None, :]
        o_BHV = jnp.einsum("bhk,bhkv->bhv", q_BHK, state_BHKV, precision=jax.lax.Precision.HIGHEST)
        return state_BHKV, o_BHV

    inputs = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    o_BTHV, state_BHKV = scan_tokens(update, state_BHKV, [x.astype(dtype) for x in inputs], segment_ids_BT)
    return o_BTHV.astype(v_BTHV.dtype), state_BHKV
