"""The linear scan in plain XLA: an associative scan inside each chunk and a loop over chunks.

The loop limits the scratch memory and the number of passes over the data: a chunk has 6 levels of a tree, a whole row
would have log2(T). The associative scan keeps a device busy, which one token at a time would not.

B batch, T time, N chunks, C tokens of a chunk, D channels.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.linear_scan import differentiable


def scan(x_BTD: jax.Array, a_BTD: jax.Array, state_BD: jax.Array, *, reverse: bool) -> jax.Array:
    """Computes h [B, T, D]; a backend of differentiable.py."""
    if reverse:
        x_BTD, a_BTD = jnp.flip(x_BTD, axis=1), jnp.flip(a_BTD, axis=1)
        return jnp.flip(scan(x_BTD, a_BTD, state_BD, reverse=False), axis=1)
    length = x_BTD.shape[1]
    chunk = chunks.pick_chunk(None, length)

    def advance(state_BD, inputs):
        # The product of the decays since the start of the chunk, and the state if the chunk started from zero.
        since_start_BCD, inside_BCD = jax.lax.associative_scan(compose, inputs, axis=1)
        h_BCD = since_start_BCD * state_BD[:, None] + inside_BCD
        return h_BCD[:, -1], h_BCD

    _, h_NBCD = jax.lax.scan(advance, state_BD, (_split(a_BTD, chunk), _split(x_BTD, chunk)))
    h_BNCD = jnp.moveaxis(h_NBCD, 0, 1)
    return h_BNCD.reshape(x_BTD.shape[0], -1, x_BTD.shape[2])[:, :length]


def _split(x_BTD: jax.Array, chunk: int) -> jax.Array:
    """Reshapes [B, T, D] to [N, B, C, D], padding T with zeros."""
    x_BTD = chunks.pad_time(x_BTD, chunk=chunk)
    batch, time, channels = x_BTD.shape
    return jnp.moveaxis(x_BTD.reshape(batch, time // chunk, chunk, channels), 1, 0)


def compose(earlier: tuple[jax.Array, jax.Array], later: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Composes two maps h -> a h + x, each given as (a, x): first `earlier`, then `later`."""
    (a, x), (later_a, later_x) = earlier, later
    return a * later_a, later_a * x + later_x


linear_scan_xla = partial(differentiable.linear_scan_with_gradient, scan)
