"""Each position's left neighbour in a row, within its document.

B batch, T time, D model width.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels import state_resets


def left_neighbours(x_BTD: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    """x at the position before each one: zero at the beginning of a row, and at document starts if ids are given."""
    before_BTD = jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if segment_ids_BT is None:
        return before_BTD
    return jnp.where(state_resets(segment_ids_BT)[..., None], 0, before_BTD)
