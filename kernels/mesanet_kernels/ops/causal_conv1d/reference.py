"""Causal depthwise convolution as it is defined: a scan over tokens that keeps the last W inputs.

B batch, T time, D channels, W taps, X = W - 1 earlier inputs.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence.token_scan import scan_tokens
from mesanet_kernels.ops.causal_conv1d.xla import ACTIVATIONS


def causal_conv1d_reference(
    activation: str | None, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT
) -> tuple[jax.Array, jax.Array]:
    """Computes `api.causal_conv1d`; `tail` is the initial state."""
    dtype = accumulation_dtype(x_BTD)

    def step(tail_BXD, token):
        (x_BD,) = token
        window_BWD = jnp.concatenate([tail_BXD, x_BD[:, None]], axis=1)
        y_BD = jnp.sum(window_BWD.astype(dtype) * w_WD.astype(dtype), axis=1) + bias_D.astype(dtype)
        return window_BWD[:, 1:], ACTIVATIONS[activation](y_BD)

    y_BTD, tail_BXD = scan_tokens(step, tail_BXD, [x_BTD], segment_ids_BT)
    return y_BTD.astype(x_BTD.dtype), tail_BXD
