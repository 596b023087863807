"""The inverse of unit lower-triangular matrices by recursive halving, from matrix products alone.

    [I + A    0  ]^-1   [    X     0]
    [  M    I + B]    = [-Y M X    Y]        X = (I + A)^-1, Y = (I + B)^-1

Products suit matrix units, and meshes can split them. Both halves of a block are inverted as further blocks of one
batch, in log2(C) levels. X and Y are inverses of parts of the system and as bounded as its own inverse, whereas the
powers of L in a Neumann series overflow float32. Autodiff follows the same recursion with twice the products; the
closed form of the gradient, -X^T dX X^T, would take six times as many.

X leading axes, C rows, P diagonal blocks of S rows.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.linear_recurrence.pairwise_decays import lower_block_rows


def unit_lower_inverse(L_XCC: jax.Array) -> jax.Array:
    """Returns (I + L)^{-1} [..., C, C] for a strictly lower-triangular L, where C is a power of two.

    Blocks of L that are exactly 0, e.g. between documents, are exactly 0 in the inverse too.
    """
    return _inverse(L_XCC[..., None, :, :])[..., 0, :, :]


def _inverse(L_XPSS):
    """Returns the inverse of I plus each diagonal block, [..., P, S, S]."""
    size = L_XPSS.shape[-1]
    if size == 1:
        return jnp.ones_like(L_XPSS)
    half = size // 2
    diagonal_XP2SS = jnp.stack([L_XPSS[..., :half, :half], L_XPSS[..., half:, half:]], axis=-3)
    # The blocks of all levels share one axis, because XLA's matrix products on CPUs crash at rank 8.
    inverse_XPSS = _inverse(diagonal_XP2SS.reshape(*L_XPSS.shape[:-3], -1, half, half))
    first, second = jnp.moveaxis(inverse_XPSS.reshape(diagonal_XP2SS.shape), -3, 0)
    across = -_product(_product(second, L_XPSS[..., half:, :half]), first)
    return jnp.concatenate(lower_block_rows(first, across, second), axis=-2)


def _product(a_XPSS, b_XPSS):
    """Returns the matrix products a @ b."""
    return product("...ij,...jk->...ik", a_XPSS, b_XPSS, a_XPSS.dtype)
