"""What the fused solvers share: from the chunked form to the arrays of a kernel, on any mesh.

A kernel is a function of the systems of all chunks, rows and heads,

    kernel(unit_RCK, start_RCK, k_RCK, high_RKK, low_RKK, intra_RCC, enter_RC, lam_HK, *, max_iters, tol)
        -> (x_RCK float32, iterations_RC int32)

that solves H_t x_t + lam x_t = unit_t from `start`, with keys and both parts of the entering state in `half`.

R chunks of all rows and heads (N*B*H, heads last), C tokens of a chunk, H heads, K key size.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax

from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa.solver import Solution, normalize
from mesanet_kernels.partition import partitioned

LARGEST_STATE = 2.0**14  # of a matrix in float16, with room for the decay and the sum of both parts
AXES = ("NBHCK", "NBHCK", "NBHCK", "NBHKK", "NBHKK", "NBHCC", "NBHC", "HK")  # of a kernel's arrays, before flattening
# Below this a row's residual is rounding, and the row rests.
ROUNDING = float(jnp.finfo(jnp.float32).eps)


def solve(kernel, half, options, chunked, rhs_NBHCK):
    """(H_t + Lambda)^{-1} rhs_t for every token, by `kernel`, with products of `half`."""
    unit_NBHCK, norm_NBHC1 = normalize(rhs_NBHCK)
    start_NBHCK = unit_NBHCK / chunked_lib.diagonal(chunked)
    h_kk_NBHKK = chunked.h_kk_NBHKK
    size_NBH = jnp.maximum(jnp.max(jnp.abs(h_kk_NBHKK), axis=(-2, -1)) / LARGEST_STATE, 1.0)
    high_NBHKK, low_NBHKK = in_two_parts(h_kk_NBHKK / size_NBH[..., None, None], half)
    arrays = (
        unit_NBHCK,
        start_NBHCK,
        chunked.k_NBHCK.astype(half),
        high_NBHKK,
        low_NBHKK,
        chunked.weights.intra_NBHCC,
        chunked.weights.enter_NBHC * size_NBH[..., None],
        chunked.lam_HK,
    )
    call = partial(_flat, partial(kernel, max_iters=options.max_iters, tol=options.tol))
    x_NBHCK, iterations_NBHC = partitioned(call, arrays, axes=AXES, results=("NBHCK", "NBHC"))
    if options.tol == 0:  # rows that rest at rounding error have had all their steps
        iterations_NBHC = jnp.full_like(iterations_NBHC, options.max_iters)
    return Solution(x_NBHCK * norm_NBHC1, iterations_NBHC)


def _flat(kernel, *arrays):
    """The kernel over all chunks, rows and heads at once."""
    *arrays, lam_HK = arrays
    leading = arrays[0].shape[:3]
    x_RCK, iterations_RC = kernel(*(x.reshape(-1, *x.shape[3:]) for x in arrays), lam_HK)
    return x_RCK.reshape(*leading, *x_RCK.shape[1:]), iterations_RC.reshape(*leading, -1)


def divide(a, b, valid):
    """a / b; 0 where not valid, or where half precision has left b, which is positive, at or below 0."""
    valid = valid & (b > 0)
    return jnp.where(valid, a / jnp.where(valid, b, 1.0), 0.0)


def in_two_parts(x, half):
    """x as the sum of two arrays of `half`. Not by a cast there and back, which the compiler may take for nothing."""
    info = jnp.finfo(half)
    high = lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)
    return high.astype(half), (x - high).astype(half)
