"""The linear scan and its gradient, given a backend that computes the recurrence.

A backend is a function `scan(x_BTD, a_BTD, state_BD, *, reverse)` of arrays of one dtype. It returns h_BTD with
h_t = a_t h_{t-1} + x_t, computed from the last token to the first if `reverse` is true.

B batch, T time, D channels.
"""

from typing import Protocol

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.documents import state_resets


class Scan(Protocol):
    """A backend."""

    def __call__(self, x_BTD: jax.Array, a_BTD: jax.Array, state_BD: jax.Array, *, reverse: bool) -> jax.Array: ...


def _linear_scan(scan: Scan, x_BTD, a_BTD, state_BD, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Computes `api.linear_scan` with the given backend."""
    return _forward(scan, x_BTD, a_BTD, state_BD, segment_ids_BT)[0]


def _forward(scan, x_BTD, a_BTD, state_BD, segment_ids_BT):
    dtype = accumulation_dtype(x_BTD, a_BTD)
    decay_BTD = jnp.where(reset_mask(segment_ids_BT), 0, a_BTD.astype(dtype))
    h_BTD = scan(x_BTD.astype(dtype), decay_BTD, state_BD, reverse=False)
    templates = jnp.zeros((), x_BTD.dtype), jnp.zeros((), a_BTD.dtype)  # they carry the dtypes of the gradients
    return (h_BTD.astype(x_BTD.dtype), h_BTD[:, -1]), (decay_BTD, h_BTD, state_BD, segment_ids_BT, templates)


def _backward(scan, saved, cotangents):
    """Runs the same recurrence from the last token to the first: g_t = dh_t + a_{t+1} g_{t+1}."""
    decay_BTD, h_BTD, state_BD, segment_ids_BT, (x, a) = saved
    dh_BTD, dfinal_BD = cotangents
    decay_after_BTD = jnp.concatenate([decay_BTD[:, 1:], jnp.ones_like(decay_BTD[:, :1])], axis=1)
    g_BTD = scan(dh_BTD.astype(h_BTD.dtype), decay_after_BTD, dfinal_BD, reverse=True)
    before_BTD = jnp.concatenate([state_BD[:, None], h_BTD[:, :-1]], axis=1)
    da_BTD = jnp.where(reset_mask(segment_ids_BT), 0, g_BTD * before_BTD)
    return g_BTD.astype(x.dtype), da_BTD.astype(a.dtype), decay_BTD[:, 0] * g_BTD[:, 0], None


linear_scan_with_gradient = jax.custom_vjp(_linear_scan, nondiff_argnums=(0,))
linear_scan_with_gradient.defvjp(_forward, _backward)


def reset_mask(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns bool [B, T, 1]: whether the state is zero before a token, because a document starts there."""
    return state_resets(segment_ids_BT)[..., None]
