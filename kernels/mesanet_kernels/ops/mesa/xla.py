"""Mesa's solve in plain XLA: all chunks at once, in the accumulation dtype.

B batch, N chunks, C tokens of a chunk, H heads, K key size.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa.solver import conjugate_gradients, preconditioned_conjugate_gradients


def solve_systems_xla(options, chunked, rhs_NBHCK):
    """(H_t + Lambda)^{-1} rhs_t for every token."""
    lam_H1K = chunked.lam_HK[:, None, :]

    def operator(p_NBHCK):
        return chunked_lib.read_keys(chunked, p_NBHCK) + lam_H1K * p_NBHCK

    limits = dict(max_iters=options.max_iters, tol=options.tol)
    if options.solver == "cg":
        return conjugate_gradients(operator, chunked_lib.diagonal(chunked), rhs_NBHCK, **limits)
    inverse_NBHKK = mean_inverse(chunked)

    def precondition(r_NBHCK):
        return chunks.product("nbhck,nbhkl->nbhcl", r_NBHCK, inverse_NBHKK, r_NBHCK.dtype)

    return preconditioned_conjugate_gradients(operator, precondition, rhs_NBHCK, **limits)


def mean_inverse(chunked):
    """The inverse of the mean of a chunk's matrices H_t + Lambda, [N,B,H,K,K].

    All of them share the state that enters the chunk, where slow heads keep what makes them ill-conditioned. Of the
    matrices tried (the entering state alone, H of the middle or of the last token), the mean needs the fewest steps.
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


mesa_xla = partial(chunked_lib.mesa_chunked, solve_systems_xla)
