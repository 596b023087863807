"""What lies between two tokens of a chunk, computed by halves: pairs of blocks of 1, 2, 4 ... tokens become one block.

The decay from token s to token t splits at any boundary between them. At the boundary between two halves

    log decay from s to t = until_s + since_t        until, since <= 0

where until_s adds the log decays of the first half after s, since_t those of the second half up to t. So every sum
is made of the terms between s and t and no other: a difference of two running sums would lose the small decays behind a
large one, let one document's gates round another's, and be positive where it has to be split between two factors.

N chunks, B batch, H heads, C tokens of a chunk, K channels, P pairs of blocks, S tokens of a block.
"""

import jax.numpy as jnp


def pairwise_values(diagonal_NBHC, log_decay_NBHCK, across):
    """The values of all pairs of tokens of a chunk, and the sums of log decays they were made of.

    Args:
      diagonal_NBHC: value of a token with itself.
      log_decay_NBHCK: at most 0; C is a power of two.
      across: the function (since, until, size) -> values [N, B, H, P, S, S] of a token of the second half of a pair
        (row) with one of the first (column), from the sums [N, B, H, P, S, K] of those two.

    Returns:
      values [N, B, H, C, C], any number above the diagonal; the log decays [N, B, H, C, K] since the chunk began, a
      token's own counted, and until it ends, a token's own not counted: a state decays, then it is written to.
    """
    chunk = log_decay_NBHCK.shape[3]
    pairs_NBHCS, since_NBHCK, until_NBHCK = diagonal_NBHC[..., None], log_decay_NBHCK, jnp.zeros_like(log_decay_NBHCK)
    for size in (1 << level for level in range(chunk.bit_length() - 1)):
        pairs, since, until = (split_halves(x, size) for x in (pairs_NBHCS, since_NBHCK, until_NBHCK))
        pairs_NBHCS = merge_halves(*lower_block_rows(pairs[0], across(since[1], until[0], size), pairs[1]))
        first, second = (x[..., -1:, :] for x in since)  # all that a half decays
        since_NBHCK = merge_halves(since[0], first + since[1])
        until_NBHCK = merge_halves(until[0] + second, until[1])
    return pairs_NBHCS, since_NBHCK, until_NBHCK


def split_halves(x_NBHCX, size):
    """The first and the second `size` of every 2 `size` tokens, [N, B, H, P, S, ...]."""
    pairs = x_NBHCX.reshape(*x_NBHCX.shape[:3], -1, 2, size, x_NBHCX.shape[-1])
    return pairs[..., 0, :, :], pairs[..., 1, :, :]


def merge_halves(first, second):
    """The inverse of `split_halves`."""
    joined = jnp.stack([first, second], axis=-3)
    return joined.reshape(*joined.shape[:3], -1, joined.shape[-1])


def lower_block_rows(first, across, second):
    """Both rows of [first, 0; across, second]."""
    above = jnp.concatenate([first, jnp.zeros_like(across)], axis=-1)
    return above, jnp.concatenate([across, second], axis=-1)
