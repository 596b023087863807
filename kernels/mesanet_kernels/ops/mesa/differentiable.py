"""Mesa around one platform's kernels, with their gradients (mesanet.md 1.6), on any mesh.

B batch, T time, H heads, K key size, V value size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.partition import partitioned

AXES = ("BTHK", "BTHK", "BTHV", "BTH", "BTH", "HK", "BHKK", "BHKV", "BT")


class MesaKernels(NamedTuple):
    """Functions of `options` and arrays.

    forward: (q, k, v, log_decay, beta, lam, h_kk, h_kv, segment_ids) -> (o, final h_kk and h_kv, iterations [B,T,H], *kept).
    backward: (k, v, ..., segment_ids, *kept, do, dh_kk, dh_kv) -> gradients of q, k, v, log_decay, beta, of lam for
      each row of the batch [B,H,K], of h_kk and h_kv.
    kept: a letter for each dimension of the arrays that are kept between them.
    """

    forward: Callable
    backward: Callable
    kept: tuple[str, ...]


def mesa_from_kernels(kernels, options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """Returns (o [B,T,H,V], (h_kk, h_kv), iterations [B,T,H]); `api.mesa` says what each argument is."""
    arrays = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, *state, segment_ids_BT)
    o_BTHV, h_kk_BHKK, h_kv_BHKV, iterations_BTH = _mesa(kernels, options, *arrays)
    return o_BTHV, (h_kk_BHKK, h_kv_BHKV), iterations_BTH


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mesa(kernels, options, *arrays):
    return _forward(kernels, options, *arrays)[0]


def _forward(kernels, options, *arrays):
    results = ("BTHV", "BHKK", "BHKV", "BTH", *kernels.kept)
    o_BTHV, h_kk_BHKK, h_kv_BHKV, iterations_BTH, *kept = partitioned(
        partial(kernels.forward, options), arrays, axes=AXES, results=results
    )
    if options.tol == 0:  # rows that rest at rounding error have had all their steps
        iterations_BTH = jnp.full_like(iterations_BTH, options.max_iters)
    return (o_BTHV, h_kk_BHKK, h_kv_BHKV, iterations_BTH), (arrays[1:], kept)


def _backward(kernels, options, saved, cotangents):
    inputs, kept = saved
    do_BTHV, dh_kk_BHKK, dh_kv_BHKV, _ = cotangents
    dq, dk, dv, dlog_decay, dbeta, dlam, *dstate = partitioned(
        partial(kernels.backward, options),
        (*inputs, *kept, do_BTHV, dh_kk_BHKK, dh_kv_BHKV),
        axes=(*AXES[1:], *kernels.kept, "BTHV", "BHKK", "BHKV"),
        results=(*AXES[:5], "BHK", *AXES[6:8]),
    )
    return dq, dk, dv, dlog_decay, dbeta, jnp.sum(dlam, axis=0), *dstate, None


_mesa.defvjp(_forward, _backward)
