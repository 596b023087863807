"""The gated delta rule as it is defined: a scan over tokens, differentiated automatically.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens


def delta_rule_reference(chunk, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV, segment_ids_BT):
    """Returns (o [B, T, H, V], final state [B, H, K, V]) with the arguments of `api.delta_rule`; `chunk` is ignored."""
    del chunk
    dtype = accumulation_dtype(q_BTHK, k_BTHK, v_BTHV)

    def read(x_BHK, state_BHKV):
        return jnp.einsum("bhk,bhkv->bhv", x_BHK, state_BHKV, precision=jax.lax.Precision.HIGHEST)

    def update(state_BHKV, token):
        q_BHK, k_BHK, v_BHV, beta_BH, log_decay_BH = token
        state_BHKV = jnp.exp(log_decay_BH)[..., None, None] * state_BHKV
        write_BHV = beta_BH[..., None] * (v_BHV - read(k_BHK, state_BHKV))
        state_BHKV = state_BHKV + k_BHK[..., None] * write_BHV[..., None, :]
        return state_BHKV, read(q_BHK, state_BHKV)

    inputs = (q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH)
    o_BTHV, state_BHKV = scan_tokens(update, state_BHKV, [x.astype(dtype) for x in inputs], segment_ids_BT)
    return o_BTHV.astype(v_BTHV.dtype), state_BHKV
