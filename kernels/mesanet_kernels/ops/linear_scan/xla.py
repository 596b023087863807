"""The linear scan in chunks, in plain XLA: an associative scan inside a chunk, a loop over chunks.

The loop bounds the scratch memory and the number of passes over the data (6 levels of a tree instead of log2 T); the
tree keeps a device busy where one token at a time would not.

B batch, T time, N chunks, C tokens of a chunk, D channels.
"""

from functools import partial

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.linear_scan import differentiable


def scan(x_BTD, a_BTD, state_BD, *, reverse):
    """h [B, T, D], as `differentiable` calls it."""
    if reverse:
        backwards = lambda z_BTD: jnp.flip(z_BTD, axis=1)
        return backwards(scan(backwards(x_BTD), backwards(a_BTD), state_BD, reverse=False))
    length = x_BTD.shape[1]
    chunk = chunks.pick_chunk(None, length)

    def advance(state_BD, inputs):
        # Product of the decays since the chunk began, and the state of a chunk that began with zero.
        since_start_BCD, inside_BCD = jax.lax.associative_scan(compose, inputs, axis=1)
        h_BCD = since_start_BCD * state_BD[:, None] + inside_BCD
        return h_BCD[:, -1], h_BCD

    _, h_NBCD = jax.lax.scan(advance, state_BD, (_split(a_BTD, chunk), _split(x_BTD, chunk)))
    h_BNCD = jnp.moveaxis(h_NBCD, 0, 1)
    return h_BNCD.reshape(x_BTD.shape[0], -1, x_BTD.shape[2])[:, :length]


def _split(x_BTD, chunk):
    """[B, T, D] -> [N, B, C, D], padding T with zeros."""
    x_BTD = chunks.pad_time(x_BTD, chunk=chunk)
    batch, time, channels = x_BTD.shape
    return jnp.moveaxis(x_BTD.reshape(batch, time // chunk, chunk, channels), 1, 0)


def compose(earlier, later):
    """The map h -> a h + x of two spans of tokens, one after the other."""
    (a, x), (later_a, later_x) = earlier, later
    return a * later_a, later_a * x + later_x


linear_scan = partial(differentiable.linear_scan, scan)
