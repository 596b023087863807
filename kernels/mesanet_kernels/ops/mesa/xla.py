"""Mesa's solve in plain XLA: all chunks at once, in the accumulation dtype.

B batch, N chunks, C tokens of a chunk, H heads, K key size.
"""

from functools import partial

from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa.solver import conjugate_gradients


def solve(options, chunked, rhs_NBHCK):
    """(H_t + Lambda)^{-1} rhs_t for every token."""
    lam_H1K = chunked.lam_HK[:, None, :]

    def operator(p_NBHCK):
        return chunked_lib.read_keys(chunked, p_NBHCK) + lam_H1K * p_NBHCK

    diagonal_NBHCK = chunked_lib.diagonal(chunked)
    return conjugate_gradients(operator, diagonal_NBHCK, rhs_NBHCK, max_iters=options.max_iters, tol=options.tol)


mesa = partial(chunked_lib.mesa, solve)
