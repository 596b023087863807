"""Causal depthwise convolution as W shifted multiply-adds.

B batch, T time, D channels, W taps, S = T + W - 1.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype

ACTIVATIONS = {None: lambda x: x, "silu": jax.nn.silu}


@partial(jax.checkpoint, static_argnums=0)  # autodiff alone would keep W shifted float32 copies of x
def causal_conv1d(activation, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT):
    """`tail` [B, W-1, D] are the inputs before the first, of the first token's document."""
    (width, _), (_, length, _) = w_WD.shape, x_BTD.shape
    dtype = accumulation_dtype(x_BTD)
    x_BSD = jnp.concatenate([tail_BXD, x_BTD], axis=1)
    segment_ids_BS = jnp.pad(segment_ids_BT, ((0, 0), (width - 1, 0)), mode="edge")

    y_BTD = jnp.broadcast_to(bias_D.astype(dtype), x_BTD.shape)
    for tap in range(width):
        same_BT1 = (segment_ids_BS[:, tap:tap + length] == segment_ids_BT)[..., None]
        seen_BTD = jnp.where(same_BT1, x_BSD[:, tap:tap + length], 0)
        y_BTD += w_WD[tap].astype(dtype) * seen_BTD.astype(dtype)
    final_BX1 = (segment_ids_BS[:, length:] == segment_ids_BT[:, -1:])[..., None]
    final_BXD = jnp.where(final_BX1, x_BSD[:, length:], 0)
    return ACTIVATIONS[activation](y_BTD).astype(x_BTD.dtype), final_BXD
