"""The diagonal state space model as it is defined: a loop over tokens, differentiated automatically.

B batch, T time, H channels, N modes.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens
from mesanet_kernels.ops.diagonal_ssm.discretise import zero_order_hold


def diagonal_ssm_reference(
    chunk: int, u_BTH, log_rate_N, log_frequency_N, c_re_HN, c_im_HN, skip_H, state, segment_ids_BT
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Computes `api.diagonal_ssm`; `chunk` has no effect."""
    del chunk
    dtype = accumulation_dtype(u_BTH)
    lambda_N, gain_N = zero_order_hold(log_rate_N, log_frequency_N)
    decay_N, c_HN = jnp.exp(lambda_N), jax.lax.complex(c_re_HN, c_im_HN)

    def step(state_BHN, token):
        (u_BH,) = token
        state_BHN = decay_N * state_BHN + gain_N * u_BH[..., None]
        return state_BHN, jnp.sum((c_HN * state_BHN).real, axis=-1) + skip_H * u_BH

    y_BTH, state_BHN = scan_tokens(step, jax.lax.complex(*state), [u_BTH.astype(dtype)], segment_ids_BT)
    return y_BTH.astype(u_BTH.dtype), (state_BHN.real, state_BHN.imag)
