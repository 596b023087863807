"""The linear scan as it is defined: a loop over tokens, differentiated automatically.

B batch, T time, D channels.
"""

import jax

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens


def linear_scan_reference(x_BTD, a_BTD, state_BD, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Computes `api.linear_scan`."""
    dtype = accumulation_dtype(x_BTD, a_BTD)

    def step(state_BD, token):
        x_BD, a_BD = token
        state_BD = a_BD * state_BD + x_BD
        return state_BD, state_BD

    h_BTD, state_BD = scan_tokens(step, state_BD, [x_BTD.astype(dtype), a_BTD.astype(dtype)], segment_ids_BT)
    return h_BTD.astype(x_BTD.dtype), state_BD
