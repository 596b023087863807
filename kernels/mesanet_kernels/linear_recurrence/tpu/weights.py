"""`ChunkWeights` on TPUs: sums of log decays as products with matrices of ones.

Between tokens s < t lie the log decays g of s + 1 ... t. Every pair sums its own terms alone, for the reasons that
pairwise_decays.py gives:

    between_ts = sum_j [j <= t] [j > s] g_j          since_t = sum_j [j <= t] g_j

Ones are exact in bfloat16, and every float32 number is the sum of three bfloat16 parts. Documents appear only in the
decays: the first token of a document decays everything before it to 0.

B batch, T time, N chunks, C tokens of a chunk, H heads.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mesanet_kernels.documents import state_resets
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, HALF


def chunk_weights_tpu(log_decay_BTH, beta_BTH, segment_ids_BT) -> ChunkWeights:
    """Returns the `ChunkWeights` of a sequence, float32, in chunks of 128; differentiable in decays and input gates."""
    begins_BT1 = state_resets(segment_ids_BT)[..., None]
    floor = chunks.LOG_DECAY_FLOOR  # its exponential is 0
    log_decay_BTH = jnp.where(begins_BT1, floor, jnp.maximum(log_decay_BTH, floor))
    rows = (chunks.to_chunks(x_BTH, CHUNK)[..., None, :] for x_BTH in (log_decay_BTH, beta_BTH))
    intra_NBHCC, enter_NBH1C = _weights(*rows)
    return ChunkWeights(intra_NBHCC, enter_NBH1C[..., 0, :])


def _compute_weights(log_decay_NBH1C, beta_NBH1C):
    """Returns (intra [N, B, H, C, C], enter [N, B, H, 1, C])."""

    def kernel(log_decay, beta, intra, enter):
        """Computes the weights of one chunk for a group of heads."""
        for head in range(log_decay.shape[0]):
            decay_CC, enter[head] = _decays(log_decay[head])
            intra[head] = decay_CC * beta[head]

    return _call(kernel, [CHUNK, 1], log_decay_NBH1C, beta_NBH1C)


def _weights_forward(*inputs):
    """Returns the weights, and the inputs for the backward pass."""
    return _weights(*inputs), inputs


def _weights_backward(inputs, cotangents):
    """Returns the cotangents of log_decay and beta, [N, B, H, 1, C] each."""

    def kernel(log_decay, beta, dintra, denter, dlog_decay, dbeta):
        """Computes the cotangents of the gates of one chunk for a group of heads."""
        until, after = _order()
        for head in range(log_decay.shape[0]):
            decay_CC, enter_1C = _decays(log_decay[head])
            ddecay_CC = dintra[head] * decay_CC
            dbeta[head] = jnp.sum(ddecay_CC, axis=0, keepdims=True)
            # The decay of token j, a row here, is part of all pairs s < j <= t: first the sum over t >= j, as a
            # product, then the one over s < j.
            later_CC = _times_ones(until, ddecay_CC * beta[head], transposed=True)
            between_C1 = jnp.sum(jnp.where(after, later_CC, 0.0), axis=1, keepdims=True)
            since_C1 = tiles.column(denter[head] * enter_1C)
            dlog_decay[head] = tiles.row(between_C1) + jnp.sum(jnp.where(until, since_C1, 0.0), axis=0, keepdims=True)

    return _call(kernel, [1, 1], *inputs, *cotangents)


_weights = jax.custom_vjp(_compute_weights)
_weights.defvjp(_weights_forward, _weights_backward)


def _decays(log_decay_1C):
    """Returns the decay from token s (column) to t (row) [C, C], 0 for s > t, and of the entering state [1, C]."""
    until, after = _order()
    log_decay_C1 = tiles.column(log_decay_1C)
    between_CC = _times_ones(until, jnp.where(after, log_decay_C1, 0.0))
    since_1C = jnp.sum(jnp.where(~after, log_decay_C1, 0.0), axis=0, keepdims=True)
    return jnp.where(until, jnp.exp(between_CC), 0.0), jnp.exp(since_1C)


def _order():
    """Returns bool [C, C] twice: whether the column's token is not after the row's, and whether it is before it."""
    token, other = (lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis) for axis in (0, 1))
    return other <= token, other < token


def _times_ones(ones_CC, x_CC, *, transposed=False):
    """Returns ones @ x, or ones.T @ x, to the precision of float32: three bfloat16 parts hold every bit of x."""
    return tiles.product([ones_CC.astype(HALF)], tiles.split_parts(x_CC, tiles.EXACT), a_transposed=transposed)


def _call(kernel, rows_out, *arrays):
    """Runs `kernel` on every chunk and group of heads.

    Args:
      kernel: takes references to its part of the arrays and of the results.
      rows_out: the number of rows of each result.
      arrays: [N, B, H, rows, C], float32.

    Returns:
      float32 arrays [N, B, H, rows, C].
    """
    count, batch, heads = arrays[0].shape[:3]
    group = next(group for group in tiles.HEADS if heads % group == 0)
    grid = tiles.Grid(batch, heads, count, group)
    return pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[grid.of_chunk(*x.shape[-2:]) for x in arrays],
        out_specs=[grid.of_chunk(rows, CHUNK) for rows in rows_out],
        out_shape=[tiles.out(count, batch, heads, rows, CHUNK) for rows in rows_out],
        compiler_params=tiles.COMPILER,
    )(*arrays)
