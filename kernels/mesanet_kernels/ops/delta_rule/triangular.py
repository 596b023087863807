"""The inverse of unit lower-triangular matrices by halves: products alone, so that matrix units and meshes like it.

    [I + A    0  ]^-1   [    X     0]
    [  M    I + B]    = [-Y M X    Y]        X = (I + A)^-1, Y = (I + B)^-1

Both halves go down together as further blocks, log2(C) levels. X and Y are inverses of parts of the system, as
bounded as it is; the powers of L of a Neumann series overflow float32 first. Autodiff goes down the halves too, at twice
the products; the closed form of the gradient, -X^T dX X^T, would take six times as many.

X leading axes, C rows, P diagonal blocks of S rows.
"""

import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.linear_recurrence.pairwise_decays import lower_block_rows


def unit_lower_inverse(L_XCC):
    """(I + L)^{-1} for strictly lower-triangular L, [..., C, C], C a power of two; zero blocks of L stay zero."""
    return _inverse(L_XCC[..., None, :, :])[..., 0, :, :]


def _inverse(L_XPSS):
    size = L_XPSS.shape[-1]
    if size == 1:
        return jnp.ones_like(L_XPSS)
    half = size // 2
    diagonal_XP2SS = jnp.stack([L_XPSS[..., :half, :half], L_XPSS[..., half:, half:]], axis=-3)
    # One axis for the blocks of all levels: XLA's CPU products end the process at rank 8.
    inverse_XPSS = _inverse(diagonal_XP2SS.reshape(*L_XPSS.shape[:-3], -1, half, half))
    first, second = jnp.moveaxis(inverse_XPSS.reshape(diagonal_XP2SS.shape), -3, 0)
    across = -_product(_product(second, L_XPSS[..., half:, :half]), first)
    return jnp.concatenate(lower_block_rows(first, across, second), axis=-2)


def _product(a_XPSS, b_XPSS):
    return product("...ij,...jk->...ik", a_XPSS, b_XPSS, a_XPSS.dtype)
