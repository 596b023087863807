"""Mesa around the kernels of one platform, with their gradients, on any mesh.

B batch, T time, H heads, K key size, V value size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.ops.mesa.options import MesaOptions
from mesanet_kernels.partition import partitioned

AXES = ("BTHK", "BTHK", "BTHV", "BTH", "BTH", "HK", "BHKK", "BHKV", "BT")


class MesaKernels(NamedTuple):
    """The kernels of one platform, as functions of `MesaOptions` and of arrays on one device.

    Attributes:
      forward: (options, q, k, v, log_decay, beta, lam, h_kk, h_kv, segment_ids) -> (o, final h_kk, final h_kv,
        iterations [B, T, H], *kept).
      backward: (options, k, v, log_decay, beta, lam, h_kk, h_kv, segment_ids, *kept, do, dh_kk, dh_kv) -> the gradients
        of q, k, v, log_decay, beta, lam, h_kk and h_kv, that of lam for each row of the batch, [B, H, K].
      kept: the axes of the arrays that `forward` keeps for `backward`, one letter for each dimension.
    """

    forward: Callable
    backward: Callable
    kept: tuple[str, ...]


def mesa_from_kernels(
    kernels: MesaKernels,
    options: MesaOptions,
    q_BTHK,
    k_BTHK,
    v_BTHV,
    log_decay_BTH,
    beta_BTH,
    lam_HK,
    state,
    segment_ids_BT,
):
    """Returns (o [B, T, H, V], (h_kk, h_kv), iterations [B, T, H]) with the arguments of `api.mesa`."""
    arrays = (q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, *state, segment_ids_BT)
    o_BTHV, h_kk_BHKK, h_kv_BHKV, iterations_BTH = _mesa_of_arrays(kernels, options, *arrays)
    return o_BTHV, (h_kk_BHKK, h_kv_BHKV), iterations_BTH


def _run(kernels, options, *arrays):
    """Returns (o, h_kk, h_kv, iterations)."""
    return _forward(kernels, options, *arrays)[0]


def _forward(kernels, options, *arrays):
    """Returns the results, and what the backward pass needs: the inputs except q, and what the kernels keep."""
    results = ("BTHV", "BHKK", "BHKV", "BTH", *kernels.kept)
    o_BTHV, h_kk_BHKK, h_kv_BHKV, iterations_BTH, *kept = partitioned(
        partial(kernels.forward, options), arrays, axes=AXES, results=results
    )
    if options.tol == 0:  # a token that stops at rounding error counts as one that has run all iterations
        iterations_BTH = jnp.full_like(iterations_BTH, options.max_iters)
    return (o_BTHV, h_kk_BHKK, h_kv_BHKV, iterations_BTH), (arrays[1:], kept)


def _backward(kernels, options, saved, cotangents):
    """Returns the gradients of all arrays; that of lam is summed over the batch here, outside the shard_map."""
    inputs, kept = saved
    do_BTHV, dh_kk_BHKK, dh_kv_BHKV, _ = cotangents
    dq, dk, dv, dlog_decay, dbeta, dlam, *dstate = partitioned(
        partial(kernels.backward, options),
        (*inputs, *kept, do_BTHV, dh_kk_BHKK, dh_kv_BHKV),
        axes=(*AXES[1:], *kernels.kept, "BTHV", "BHKK", "BHKV"),
        results=(*AXES[:5], "BHK", *AXES[6:8]),
    )
    return dq, dk, dv, dlog_decay, dbeta, jnp.sum(dlam, axis=0), *dstate, None


_mesa_of_arrays = jax.custom_vjp(_run, nondiff_argnums=(0, 1))
_mesa_of_arrays.defvjp(_forward, _backward)
