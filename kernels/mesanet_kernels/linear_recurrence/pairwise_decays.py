"""Sums of log decays between all pairs of tokens of a chunk, without ever subtracting two sums.

Pairs of neighbouring blocks of 1, 2, 4, ... tokens are merged until one block holds the whole chunk. A token s of the
first block and a token t of the second are separated by the boundary between the two blocks, and

    log decay from s to t = until_s + since_t        until_s, since_t <= 0

where until_s sums the log decays of the first block after s, and since_t those of the second block up to and including
t. So every sum consists of exactly the terms between s and t. The usual difference of two running sums would lose small
decays behind a large one, would let the gates of one document round those of another, and can become positive where the
decay has to be split into two factors, exp(until_s) and exp(since_t).

N chunks, B batch, H heads, C tokens of a chunk, K channels, P pairs of blocks, S tokens of a block, X any axis.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def pairwise_values(
    diagonal_NBHC: jax.Array, log_decay_NBHCK: jax.Array, across: Callable[[jax.Array, jax.Array, int], jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes a value for every pair of tokens of a chunk from the log decays on both sides of a boundary.

    Args:
      diagonal_NBHC: the value of each token with itself.
      log_decay_NBHCK: at most 0; C is a power of two.
      across: (since [N, B, H, P, S, K], until [N, B, H, P, S, K], S) -> values [N, B, H, P, S, S]: those of every token
        of the second block of a pair (row) with every token of the first (column), from the sums of both.

    Returns:
      values [N, B, H, C, C], arbitrary above the diagonal;
      since [N, B, H, C, K]: the log decay from the beginning of the chunk to each token, its own included;
      until [N, B, H, C, K]: the log decay from each token to the end of the chunk, its own excluded, because a state
      decays before a token is written to it.
    """
    chunk = log_decay_NBHCK.shape[3]
    values_NBHCS, since_NBHCK, until_NBHCK = diagonal_NBHC[..., None], log_decay_NBHCK, jnp.zeros_like(log_decay_NBHCK)
    for size in (1 << level for level in range(chunk.bit_length() - 1)):
        values, since, until = (split_pairs(x, size) for x in (values_NBHCS, since_NBHCK, until_NBHCK))
        values_NBHCS = merge_pairs(*lower_block_rows(values[0], across(since[1], until[0], size), values[1]))
        first, second = (x[..., -1:, :] for x in since)  # the log decay of each whole block
        since_NBHCK = merge_pairs(since[0], first + since[1])
        until_NBHCK = merge_pairs(until[0] + second, until[1])
    return values_NBHCS, since_NBHCK, until_NBHCK


def split_pairs(x_NBHCX: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Returns the first and the second block of every pair of blocks of `size` tokens, each [N, B, H, P, S, X]."""
    pairs = x_NBHCX.reshape(*x_NBHCX.shape[:3], -1, 2, size, x_NBHCX.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def merge_pairs(first_NBHPSX: jax.Array, second_NBHPSX: jax.Array) -> jax.Array:
    """Returns [N, B, H, C, X]; undoes `split_pairs`."""
    merged = jnp.stack([first_NBHPSX, second_NBHPSX], axis=-3)
    return merged.reshape(*merged.shape[:3], -1, merged.shape[-1])


def lower_block_rows(first: jax.Array, across: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the upper and the lower rows of the block matrix [first, 0; across, second]."""
    above = jnp.concatenate([first, jnp.zeros_like(across)], axis=-1)
    return above, jnp.concatenate([across, second], axis=-1)
