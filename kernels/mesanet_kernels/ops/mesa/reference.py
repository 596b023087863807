"""Mesa as it is defined (docs/mesa.md, "The layer"): a scan over tokens with a dense solve for each.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens


def mesa_reference(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """Returns (o [B, T, H, V], (h_kk, h_kv), iterations [B, T, H]) with the arguments of `api.mesa`.

    The solution is exact: `options` is ignored, and `iterations` is 0.
    """
    del options
    dtype = accumulation_dtype(q_BTHK, k_BTHK, v_BTHV)
    lam_HKK = lam_HK.astype(dtype)[..., None] * jnp.eye(lam_HK.shape[-1], dtype=dtype)

    def update(state, token):
        q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH = token
        h_kk_BHKK, h_kv_BHKV = state
        decay_BH11 = jnp.exp(log_decay_BH)[..., None, None]
        key_BHK1 = (beta_BH[..., None] * k_BHK)[..., None]
        h_kk_BHKK = decay_BH11 * h_kk_BHKK + key_BHK1 * k_BHK[..., None, :]
        h_kv_BHKV = decay_BH11 * h_kv_BHKV + key_BHK1 * v_BHV[..., None, :]
        solution_BHK = jnp.linalg.solve(h_kk_BHKK + lam_HKK, q_BHK[..., None])[..., 0]
        o_BHV = jnp.einsum("bhk,bhkv->bhv", solution_BHK, h_kv_BHKV, precision=jax.lax.Precision.HIGHEST)
        return (h_kk_BHKK, h_kv_BHKV), o_BHV

    inputs = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH)
    o_BTHV, state = scan_tokens(update, state, [x.astype(dtype) for x in inputs], segment_ids_BT)
    return o_BTHV.astype(v_BTHV.dtype), state, jnp.zeros(log_decay_BTH.shape, jnp.int32)
