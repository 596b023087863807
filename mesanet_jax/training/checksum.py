"""A 32-bit checksum of every array of a tree, which does not depend on how the arrays are split over devices.

A checkpoint stores these checksums, so that a restore notices values that changed on the disk: the file formats that
Orbax writes (Zarr and OCDBT) have no checksum of the values.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_BITS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by the size of an element in bytes


@jax.jit
def checksums(tree: Any) -> Any:
    """Returns the checksum of every array of `tree`, as uint32 scalars.

    The checksum of an array is the sum of bits * (2 * index + 1) modulo 2^32 over its elements, where `bits` are the
    bits of an element as an unsigned integer and `index` is its position in row-major order. The factors are odd, so a
    change of a single element is always detected. They differ from each other, so that swapping two elements is almost
    always detected. Several changes can cancel out, but by chance only one time in 2^32. Integer sums do not depend on
    their order, and therefore not on the mesh.
    """
    return jax.tree.map(_checksum, tree)


def _checksum(x: jax.Array) -> jax.Array:
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        index = index * size + lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    bits = lax.bitcast_convert_type(x, _BITS[x.dtype.itemsize]).astype(jnp.uint32)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
