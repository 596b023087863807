"""Mesa's solve in plain XLA: all chunks at once, in the accumulation dtype.

B batch, N chunks, C tokens of a chunk, H heads, K key size, L rows of an inverse.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa.options import MesaOptions
from mesanet_kernels.ops.mesa.solver import Solution, conjugate_gradients, preconditioned_conjugate_gradients


def solve_systems_xla(options: MesaOptions, chunked: chunked_lib.ChunkedStates, rhs_NBHCK: jax.Array) -> Solution:
    """Solves (H_t + Lambda) x_t = rhs_t for every token, by the solver that `options` names."""
    lam_H1K = chunked.lam_HK[:, None, :]

    def operator(p_NBHCK):
        """Returns (H_t + Lambda) p_t."""
        return chunked_lib.read_keys(chunked, p_NBHCK) + lam_H1K * p_NBHCK

    if options.solver == "cg":
        diagonal_NBHCK = chunked_lib.diagonal(chunked)
        return conjugate_gradients(operator, diagonal_NBHCK, rhs_NBHCK, max_iters=options.max_iters, tol=options.tol)
    inverse_NBHKK = mean_inverse(chunked)

    def precondition(r_NBHCK):
        return chunks.product("nbhck,nbhkl->nbhcl", r_NBHCK, inverse_NBHKK, r_NBHCK.dtype)

    return preconditioned_conjugate_gradients(
        operator, precondition, rhs_NBHCK, max_iters=options.max_iters, tol=options.tol
    )


def mean_inverse(chunked: chunked_lib.ChunkedStates) -> jax.Array:
    """Returns the inverse of the mean of the matrices H_t + Lambda of each chunk, [N, B, H, K, K].

    These matrices share the state that enters the chunk, and in heads that forget slowly that state makes them
    ill-conditioned. The mean needs fewer iterations than the entering state alone or H of the middle or the last token.
    """
    k_NBHCK, weights = chunked.k_NBHCK, chunked.weights
    dtype = k_NBHCK.dtype
    weighted_NBHCK = k_NBHCK * jnp.mean(weights.intra_NBHCC, axis=-2)[..., None]
    inside_NBHKK = chunks.product("nbhck,nbhcl->nbhkl", weighted_NBHCK, k_NBHCK, dtype)
    before_NBHKK = jnp.mean(weights.enter_NBHC, axis=-1)[..., None, None] * chunked.h_kk_NBHKK
    identity_KK = jnp.eye(k_NBHCK.shape[-1], dtype=dtype)
    mean_NBHKK = inside_NBHKK + before_NBHKK + chunked.lam_HK[..., None] * identity_KK
    factor_NBHKK = jax.lax.linalg.cholesky(mean_NBHKK)
    half_NBHKK = jax.lax.linalg.triangular_solve(
        factor_NBHKK, jnp.broadcast_to(identity_KK, mean_NBHKK.shape), left_side=True, lower=True
    )
    return chunks.product("nbhmk,nbhml->nbhkl", half_NBHKK, half_NBHKK, dtype)


def mesa_xla(options: MesaOptions, *arrays):
    """Returns (o [B, T, H, V], (h_kk, h_kv), iterations [B, T, H]) with the arguments of `api.mesa`."""
    return chunked_lib.mesa_chunked(solve_systems_xla, options, *arrays)
