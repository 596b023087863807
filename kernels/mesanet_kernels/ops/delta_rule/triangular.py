"""The inverse of unit lower-triangular matrices by halves: products alone, so that matrix units and meshes like it.

    [I + A    0  ]^-1   [    X     0]
    [  M    I + B]    = [-Y M X    Y]        X = (I + A)^-1, Y = (I + B)^-1

Both halves go down together as a batch, log2(C) levels. The blocks X and Y are inverses of parts of the system, as
bounded as it is; the powers of L of a Neumann series overflow float32 first. Autodiff goes down the halves too, at twice
the products; the closed form of the gradient, -X^T dX X^T, would take six times as many.

X leading axes, C rows.
"""

import jax.numpy as jnp

from mesanet_kernels.chunks import product


def unit_lower_inverse(L_XCC):
    """(I + L)^{-1} for strictly lower-triangular L, [..., C, C]; where L holds zero blocks, so does its inverse."""
    size = L_XCC.shape[-1]
    if size == 1:
        return jnp.ones_like(L_XCC)
    if size % 2:
        padded = jnp.pad(L_XCC, [(0, 0)] * (L_XCC.ndim - 2) + [(0, 1), (0, 1)])
        return unit_lower_inverse(padded)[..., :size, :size]
    half = size // 2
    lower = L_XCC[..., half:, :half]
    first, second = unit_lower_inverse(jnp.stack([L_XCC[..., :half, :half], L_XCC[..., half:, half:]]))
    corner = -_product(_product(second, lower), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _product(a_XCC, b_XCC):
    return product("...ij,...jk->...ik", a_XCC, b_XCC, a_XCC.dtype)
