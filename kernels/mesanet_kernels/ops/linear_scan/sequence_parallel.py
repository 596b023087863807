"""How a shard of the sequence changes the state of a linear scan: h becomes a h + x.

B batch, T time, D channels.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.ops.linear_scan.differentiable import reset_mask
from mesanet_kernels.ops.linear_scan.xla import compose
from mesanet_kernels.sequence_parallel import ShardTransition


def summarise(x_BTD, a_BTD, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Returns a and x of the whole shard, [B, D].

    Neighbouring tokens are composed in pairs, log2(T) times, until one is left.
    """
    dtype = accumulation_dtype(x_BTD, a_BTD)
    a_BTD = jnp.where(reset_mask(segment_ids_BT), 0, a_BTD.astype(dtype))
    x_BTD = x_BTD.astype(dtype)
    while x_BTD.shape[1] > 1:
        odd = (0, 0), (x_BTD.shape[1] % 2, 0), (0, 0)
        a_BTD, x_BTD = jnp.pad(a_BTD, odd, constant_values=1), jnp.pad(x_BTD, odd)
        earlier, later = ((a_BTD[:, first::2], x_BTD[:, first::2]) for first in (0, 1))
        a_BTD, x_BTD = compose(earlier, later)
    return a_BTD[:, 0], x_BTD[:, 0]


def advance(summary: tuple[jax.Array, jax.Array], state_BD: jax.Array) -> jax.Array:
    """Returns the state after the shard, from the state before it."""
    a_BD, x_BD = summary
    return a_BD * state_BD + x_BD


SHARD_TRANSITION = ShardTransition(summarise, advance)
