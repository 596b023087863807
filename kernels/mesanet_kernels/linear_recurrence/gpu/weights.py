"""`ChunkWeights` on NVIDIA Hopper: sums of log decays as products with triangular matrices of ones.

Between tokens s < t lie the log decays g of s + 1 ... t. Every pair sums its own terms alone, for the reasons that
pairwise_decays.py gives:

    between_ts = sum_j [j <= t] [s < j] g_j          since_t = g_0 + between_t0

The gradient of a log decay collects those of the pairs that it lies between and of the entering states that it has
decayed. With ddecay the cotangent of the decays, the sums over t come first, as a matrix product. What is left are sums
over a row, which stay within a warp:

    later_js = sum_t [j <= t] ddecay_ts
    dg_j = sum_s [s < j] later_js beta_s + sum_s [s >= j] dsince_s          dbeta_j = later_jj

Ones are exact in bfloat16, and every float32 number is the sum of three bfloat16 parts. Documents appear only in the
decays: the first token of a document decays everything before it to 0. One warpgroup computes one chunk.

B batch, T time, N chunks, C tokens of a chunk, H heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.documents import state_resets
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import CHUNK, ROWS

HALF = jnp.bfloat16
PARTS = 3  # bfloat16 parts, of 8 bits each, that hold every bit of a float32


def chunk_weights_gpu(log_decay_BTH, beta_BTH, segment_ids_BT) -> ChunkWeights:
    """Returns the `ChunkWeights` of a sequence, float32, in chunks of 64; differentiable in decays and input gates."""
    return ChunkWeights(*_weights(*_gates_in_chunks(log_decay_BTH, beta_BTH, segment_ids_BT)))


def gate_cotangents(
    log_decay_BTH, beta_BTH, segment_ids_BT, weights: ChunkWeights, cotangents: ChunkWeights
) -> tuple[jax.Array, jax.Array]:
    """Returns the cotangents of log_decay and beta [B, T, H], without computing the weights again.

    Args:
      weights: what `chunk_weights_gpu` returns for these gates.
      cotangents: the cotangents of `weights`.
    """
    in_chunks = partial(_gates_in_chunks, segment_ids_BT=segment_ids_BT)
    arrays, cotangents_of = jax.vjp(in_chunks, log_decay_BTH, beta_BTH)
    return cotangents_of(tuple(_weights_backward((*arrays, weights.enter_NBHC), cotangents)))


def _gates_in_chunks(log_decay_BTH, beta_BTH, segment_ids_BT):
    """Returns (log_decay, beta) [N, B, H, C], where the first token of a document decays everything before it to 0."""
    begins_BT1 = state_resets(segment_ids_BT)[..., None]
    floor = chunks.LOG_DECAY_FLOOR  # its exponential is 0
    log_decay_BTH = jnp.where(begins_BT1, floor, jnp.maximum(log_decay_BTH, floor))
    return chunks.to_chunks(log_decay_BTH, CHUNK), chunks.to_chunks(beta_BTH, CHUNK)


def _compute_weights(log_decay_NBHC, beta_NBHC):
    """Returns (intra [N, B, H, C, C], enter [N, B, H, C])."""

    def kernel(ones_s, parts_s, log_decay_s, beta_s):
        """Returns the weights of one chunk."""
        between_CC = _between(log_decay_s, ones_s, parts_s)
        first_C = jnp.sum(jnp.where(_token(1) == 0, between_CC, 0.0), axis=1)
        return _decay(between_CC) * _per_column(beta_s), jnp.exp(log_decay_s[0] + first_C)

    return _call(kernel, [(CHUNK, CHUNK), (CHUNK,)], log_decay_NBHC, beta_NBHC)


def _weights_forward(log_decay_NBHC, beta_NBHC):
    """Returns the weights, and what `_weights_backward` needs."""
    intra_NBHCC, enter_NBHC = _weights(log_decay_NBHC, beta_NBHC)
    return (intra_NBHCC, enter_NBHC), (log_decay_NBHC, beta_NBHC, enter_NBHC)


def _weights_backward(saved, cotangents):
    """Returns the cotangents of log_decay and beta, [N, B, H, C] each."""

    def kernel(ones_s, parts_s, log_decay_s, beta_s, enter_s, dintra_s, denter_s):
        """Returns the cotangents of the gates of one chunk."""
        decay_CC = _decay(_between(log_decay_s, ones_s, parts_s))
        plgpu.commit_smem()  # all warps have finished the product that read parts_s
        tiles.store_parts(tiles.split_parts(tiles.tile(dintra_s) * decay_CC, PARTS, HALF), parts_s)
        plgpu.commit_smem()
        later_CC = _product(ones_s.transpose((1, 0)), parts_s)  # row j, column s
        pairs_CC, dsince_CC = later_CC * _per_column(beta_s), _per_column(enter_s) * _per_column(denter_s)
        dlog_decay_C = jnp.sum(jnp.where(_token(1) < _token(0), pairs_CC, dsince_CC), axis=1)
        return dlog_decay_C, jnp.sum(jnp.where(_token(1) == _token(0), later_CC, 0.0), axis=1)

    return _call(kernel, [(CHUNK,), (CHUNK,)], *saved, *cotangents)


_weights = jax.custom_vjp(_compute_weights)
_weights.defvjp(_weights_forward, _weights_backward)


def _between(log_decay_s, ones_s, parts_s):
    """Returns [C, C]: the sum of the log decays between tokens s (column) and t (row); 0 for s > t.

    Leaves the triangle of ones, j <= t, in ones_s. It is in shared memory because the assembler (ptxas) moves the
    initialisation of constants in registers behind the matrix instruction that reads them, which then reads garbage.
    """
    ones_s[...] = _ones(_token(1) <= _token(0))
    after_CC = _ones(_token(1) < _token(0))
    parts_C = tiles.split_parts(tiles.untiled(log_decay_s, ROWS.reduce(1)), PARTS, HALF)
    tiles.store_parts([after_CC * tiles.per_row(part_C.astype(HALF), CHUNK) for part_C in parts_C], parts_s)
    plgpu.commit_smem()
    return _product(ones_s, parts_s)


def _decay(between_CC):
    """Returns [C, C]: the decay from token s (column) to token t (row); 0 for s > t."""
    return jnp.where(_token(1) <= _token(0), jnp.exp(between_CC), 0.0)


def _product(ones_s, parts_s):
    """Returns ones @ x, float32 [C, C], where x is the sum of the parts."""
    return tiles.product((CHUNK, CHUNK), *((ones_s, part) for part in parts_s))


def _ones(where_CC):
    """Returns a bfloat16 matrix with 1 where the condition holds and 0 elsewhere."""
    return jnp.where(where_CC, 1.0, 0.0).astype(HALF)


def _token(axis):
    """Returns int32 [C, C] with the number of each element's row (axis 0) or column (axis 1)."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=ROWS)


def _per_column(x_s):
    """Returns [C, C] with one number of a vector [C] in memory in each column."""
    return tiles.per_column(tiles.untiled(x_s, ROWS.reduce(0)), CHUNK)


def _call(kernel, results, *arrays):
    """Runs `kernel` on every chunk of every head.

    Args:
      kernel: (ones_s, parts_s, *chunk's part of each array, in shared memory) -> its part of each result, in registers.
        ones_s and parts_s are scratch matrices [C, C].
      results: the shape of each result for one chunk.
      arrays: [N, B, H, C] or [N, B, H, C, C], float32.

    Returns:
      float32 arrays [N, B, H, *shape].
    """

    def weights_of_chunk(arrays, results, arrays_s, ones_s, parts_s, loaded):
        """Loads one chunk of one head, runs `kernel` on it and stores the results."""
        place = tuple(lax.axis_index(name) for name in ("chunk", "row", "head"))
        tiles.fetch([(x.at[place], x_s) for x, x_s in zip(arrays, arrays_s)], loaded)
        plgpu.barrier_wait(loaded)
        for result, found in zip(results, kernel(ones_s, parts_s, *arrays_s)):
            result[(*place, ...)] = found

    count, batch, heads = arrays[0].shape[:3]
    memory = {4: plgpu.SMEM((CHUNK,), jnp.float32), 5: tiles.shared(CHUNK, CHUNK, dtype=jnp.float32)}
    return tiles.kernel(
        weights_of_chunk,
        out_type=(tuple(jax.ShapeDtypeStruct((count, batch, heads, *rest), jnp.float32) for rest in results),),
        grid=(count, batch, heads),
        grid_names=("chunk", "row", "head"),
        scratch_types=[
            [memory[x.ndim] for x in arrays],
            tiles.shared(CHUNK, CHUNK, dtype=HALF),
            [tiles.shared(CHUNK, CHUNK, dtype=HALF) for _ in range(PARTS)],
            plgpu.Barrier(num_arrivals=len(arrays)),
        ],
        compiler_params=tiles.COMPILER,
    )(arrays)[0]
