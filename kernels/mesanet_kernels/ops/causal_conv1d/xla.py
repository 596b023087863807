"""Causal depthwise convolution in plain XLA, as W shifted multiply-adds.

The gradient is written by hand, so that only the inputs are kept for it: automatic differentiation would keep W shifted
float32 copies of x, and XLA runs the transposes of the shifts slowly on a CPU.

B batch, T time, D channels, W taps, X = W - 1 earlier inputs, S = T + X.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype

ACTIVATIONS = {None: lambda x: x, "silu": jax.nn.silu}


def _causal_conv1d(
    activation: str | None, x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT
) -> tuple[jax.Array, jax.Array]:
    """Computes `api.causal_conv1d`; `tail` is the initial state."""
    z_BTD = _convolve(x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT)
    return ACTIVATIONS[activation](z_BTD).astype(x_BTD.dtype), last_inputs(x_BTD, tail_BXD, segment_ids_BT)


def _forward(activation, *inputs):
    return causal_conv1d_xla(activation, *inputs), inputs


def _backward(activation, inputs, cotangents):
    x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT = inputs
    dy_BTD, dfinal_BXD = cotangents
    (width, _), length = w_WD.shape, x_BTD.shape[1]
    dtype = accumulation_dtype(x_BTD)
    _, through_activation = jax.vjp(ACTIVATIONS[activation], _convolve(*inputs))
    (dz_BTD,) = through_activation(dy_BTD.astype(dtype))
    dz_BTD = jax.lax.optimization_barrier(dz_BTD)  # otherwise XLA computes it again for every tap

    x_BSD = jnp.concatenate([tail_BXD, x_BTD], axis=1)
    edges = (0, 0), (width - 1, width - 1), (0, 0)
    padded_dz = jnp.pad(dz_BTD, edges)
    dx_BSD, dw_WD = jnp.zeros(x_BSD.shape, dtype), []
    for tap in range(width):
        same_BT1 = same_document(segment_ids_BT, width, tap)
        seen_BTD = jnp.where(same_BT1, x_BSD[:, tap : tap + length], 0).astype(dtype)
        dw_WD.append(jnp.sum(dz_BTD * seen_BTD, axis=(0, 1)))
        shift = width - 1 - tap
        shifted_dz_BSD = padded_dz[:, shift : shift + x_BSD.shape[1]]
        shifted_same_BS1 = jnp.pad(same_BT1, edges)[:, shift : shift + x_BSD.shape[1]]
        dx_BSD += w_WD[tap].astype(dtype) * jnp.where(shifted_same_BS1, shifted_dz_BSD, 0)

    _, through_last = jax.vjp(lambda x, tail: last_inputs(x, tail, segment_ids_BT), x_BTD, tail_BXD)
    dlast_x_BTD, dlast_tail_BXD = through_last(dfinal_BXD)
    dx_BTD = dx_BSD[:, width - 1 :].astype(x_BTD.dtype) + dlast_x_BTD
    dtail_BXD = dx_BSD[:, : width - 1].astype(tail_BXD.dtype) + dlast_tail_BXD
    dbias_D = jnp.sum(dz_BTD, axis=(0, 1)).astype(bias_D.dtype)
    return dx_BTD, jnp.stack(dw_WD).astype(w_WD.dtype), dbias_D, dtail_BXD, None


causal_conv1d_xla = jax.custom_vjp(_causal_conv1d, nondiff_argnums=(0,))
causal_conv1d_xla.defvjp(_forward, _backward)


def _convolve(x_BTD, w_WD, bias_D, tail_BXD, segment_ids_BT) -> jax.Array:
    """Returns the sums before the activation [B, T, D], in the accumulation dtype."""
    (width, _), length = w_WD.shape, x_BTD.shape[1]
    dtype = accumulation_dtype(x_BTD)
    x_BSD = jnp.concatenate([tail_BXD, x_BTD], axis=1)
    z_BTD = jnp.broadcast_to(bias_D.astype(dtype), x_BTD.shape)
    for tap in range(width):
        seen_BTD = jnp.where(same_document(segment_ids_BT, width, tap), x_BSD[:, tap : tap + length], 0)
        z_BTD += w_WD[tap].astype(dtype) * seen_BTD.astype(dtype)
    return z_BTD


def same_document(segment_ids_BT: jax.Array, width: int, tap: int) -> jax.Array:
    """Returns bool [B, T, 1]: whether the input that `tap` multiplies belongs to the document of the token itself.

    Args:
      width: the number of taps W.
    """
    segment_ids_BS = jnp.pad(segment_ids_BT, ((0, 0), (width - 1, 0)), mode="edge")
    return (segment_ids_BS[:, tap : tap + segment_ids_BT.shape[1]] == segment_ids_BT)[..., None]


def last_inputs(x_BTD: jax.Array, tail_BXD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Returns the last W - 1 inputs [B, W-1, D], zero where they belong to an earlier document than the last token."""
    kept = tail_BXD.shape[1]
    x_BSD = jnp.concatenate([tail_BXD, x_BTD], axis=1)
    segment_ids_BS = jnp.pad(segment_ids_BT, ((0, 0), (kept, 0)), mode="edge")
    last = x_BTD.shape[1]
    same_BX1 = (segment_ids_BS[:, last:] == segment_ids_BT[:, -1:])[..., None]
    return jnp.where(same_BX1, x_BSD[:, last:], 0)
