"""The linear scan and its gradient, around any backend's scan.

A backend is a function `scan(x_BTD, a_BTD, state_BD, *, reverse)` -> h_BTD, h_t = a_t h_{t-1} + x_t, or from the last token
to the first where `reverse`, of arrays of one dtype.

B batch, T time, D channels.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.documents import state_resets


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def linear_scan(scan: Callable, x_BTD, a_BTD, state_BD, segment_ids_BT):
    """Returns (h [B,T,D], final state [B,D]); `api.linear_scan` says what each argument is."""
    return _forward(scan, x_BTD, a_BTD, state_BD, segment_ids_BT)[0]


def _forward(scan, x_BTD, a_BTD, state_BD, segment_ids_BT):
    dtype = accumulation_dtype(x_BTD, a_BTD)
    decay_BTD = jnp.where(starts(segment_ids_BT), 0, a_BTD.astype(dtype))
    h_BTD = scan(x_BTD.astype(dtype), decay_BTD, state_BD, reverse=False)
    templates = jnp.zeros((), x_BTD.dtype), jnp.zeros((), a_BTD.dtype)  # the dtypes of the gradients
    return (h_BTD.astype(x_BTD.dtype), h_BTD[:, -1]), (decay_BTD, h_BTD, state_BD, segment_ids_BT, templates)


def _backward(scan, saved, cotangents):
    """The same recurrence from the last token to the first: g_t = dh_t + a_{t+1} g_{t+1}."""
    decay_BTD, h_BTD, state_BD, segment_ids_BT, (x, a) = saved
    dh_BTD, dfinal_BD = cotangents
    decay_after_BTD = jnp.concatenate([decay_BTD[:, 1:], jnp.ones_like(decay_BTD[:, :1])], axis=1)
    g_BTD = scan(dh_BTD.astype(h_BTD.dtype), decay_after_BTD, dfinal_BD, reverse=True)
    before_BTD = jnp.concatenate([state_BD[:, None], h_BTD[:, :-1]], axis=1)
    da_BTD = jnp.where(starts(segment_ids_BT), 0, g_BTD * before_BTD)
    return g_BTD.astype(x.dtype), da_BTD.astype(a.dtype), decay_BTD[:, 0] * g_BTD[:, 0], None


linear_scan.defvjp(_forward, _backward)


def starts(segment_ids_BT):
    """Whether a token begins a document inside the row, [B, T, 1]."""
    return state_resets(segment_ids_BT)[..., None]
