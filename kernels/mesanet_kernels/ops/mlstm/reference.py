"""mLSTM as it is defined: a scan over tokens, differentiated automatically.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens

# The smallest stabiliser m. If m were smaller, the memory would be negligible beside the normaliser, which is at least
# 1, and e^-m or its square would overflow float32.
STABILISER_FLOOR = -40.0
EPSILON = 1e-6  # added to the normaliser, as in the authors' implementation


def mlstm_reference(chunk, q_BTHK, k_BTHK, v_BTHV, input_gate_BTH, forget_gate_BTH, state, segment_ids_BT):
    """Returns (o [B, T, H, V], final state (C, n, m)) with the arguments of `api.mlstm`.

    `state` is (C [B, H, K, V], n [B, H, K], m [B, H]). `chunk` is ignored.
    """
    del chunk
    dtype = accumulation_dtype(q_BTHK, k_BTHK, v_BTHV)
    scale = q_BTHK.shape[-1] ** -0.5

    def update(state, token):
        cell_BHKV, normaliser_BHK, before_BH = state
        q_BHK, k_BHK, v_BHV, input_gate_BH, forget_gate_BH = token
        log_forget_BH = jax.nn.log_sigmoid(forget_gate_BH)
        stabiliser_BH = jnp.maximum(jnp.maximum(log_forget_BH + before_BH, input_gate_BH), STABILISER_FLOOR)
        forget_BH = jnp.exp(log_forget_BH + before_BH - stabiliser_BH)
        key_BHK = jnp.exp(input_gate_BH - stabiliser_BH)[..., None] * k_BHK
        cell_BHKV = forget_BH[..., None, None] * cell_BHKV + key_BHK[..., None] * v_BHV[..., None, :]
        normaliser_BHK = forget_BH[..., None] * normaliser_BHK + key_BHK
        read_BHV = jnp.einsum("bhk,bhkv->bhv", scale * q_BHK, cell_BHKV, precision=jax.lax.Precision.HIGHEST)
        sum_BH = jnp.sum(scale * q_BHK * normaliser_BHK, axis=-1)
        return (cell_BHKV, normaliser_BHK, stabiliser_BH), normalise(read_BHV, sum_BH, stabiliser_BH)

    inputs = (q_BTHK, k_BTHK, v_BTHV, input_gate_BTH, forget_gate_BTH)
    o_BTHV, state = scan_tokens(update, state, [x.astype(dtype) for x in inputs], segment_ids_BT)
    return o_BTHV.astype(v_BTHV.dtype), state


def normalise(read: jax.Array, weight: jax.Array, stabiliser: jax.Array) -> jax.Array:
    """Returns C^T q [..., V] divided by the larger of |n^T q| and e^-m.

    Args:
      read: C^T q, [..., V]. weight: n^T q, [...]. stabiliser: m, [...].
    """
    return read / (jnp.maximum(jnp.abs(weight), jnp.exp(-stabiliser)) + EPSILON)[..., None]
