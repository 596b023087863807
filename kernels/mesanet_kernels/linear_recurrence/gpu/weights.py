"""`ChunkWeights` on NVIDIA Hopper: sums of log decays as products with triangles of ones, one warpgroup a chunk.

Between tokens s < t lie the decays of s + 1 ... t. Each pair sums its own terms alone (pairwise_decays.py says why that matters):

    between_ts = sum_j [j <= t] [s < j] g_j          since_t = g_0 + between_t0

The gradient of a decay is that of the pairs it lies between and of the states it was part of. Sums over t come first, so
that all that is left are sums over a row, which stay within a warp:

    later_js = sum_t [j <= t] ddecay_ts     dg_j = sum_s [s < j] later_js beta_s + [s >= j] dsince_s     dbeta_j = later_jj

The ones are exact in bfloat16, and a number is the sum of three parts that are. The first token of a document decays all
that came before it, which is all that the kernels know of documents.

B batch, T time, N chunks, C tokens of a chunk, H heads.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import CHUNK, ROWS

HALF = jnp.bfloat16
PARTS = 3  # of 8 bits each: all of a float32


def chunk_weights_gpu(log_decay_BTH, beta_BTH, segment_ids_BT):
    """The `ChunkWeights` of a sequence, float32, in chunks of 64."""
    return chunks.ChunkWeights(*_weights(*_of_chunks(log_decay_BTH, beta_BTH, segment_ids_BT)))


def gate_cotangents(log_decay_BTH, beta_BTH, segment_ids_BT, weights, cotangents):
    """Those of log_decay and beta, given the `chunk_weights_gpu` that these make and their cotangents."""
    arrays, cotangents_of = jax.vjp(partial(_of_chunks, segment_ids_BT=segment_ids_BT), log_decay_BTH, beta_BTH)
    return cotangents_of(tuple(_gradients((*arrays, weights.enter_NBHC), cotangents)))


def _of_chunks(log_decay_BTH, beta_BTH, segment_ids_BT):
    """Both as [N,B,H,C]; the first token of a document decays all that came before it."""
    begins_BT1 = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1])[..., None] != 0
    floor = chunks.LOG_DECAY_FLOOR  # its exponential is 0
    log_decay_BTH = jnp.where(begins_BT1, floor, jnp.maximum(log_decay_BTH, floor))
    return tuple(chunks.to_chunks(x_BTH, CHUNK) for x_BTH in (log_decay_BTH, beta_BTH))


@jax.custom_vjp
def _weights(log_decay_NBHC, beta_NBHC):
    """(intra [N,B,H,C,C], enter [N,B,H,C])."""

    def kernel(ones_s, parts_s, log_decay_s, beta_s):
        between_CC = _between(log_decay_s, ones_s, parts_s)
        first_C = jnp.sum(jnp.where(_token(1) == 0, between_CC, 0.0), axis=1)
        return _decay(between_CC) * _per_column(beta_s), jnp.exp(log_decay_s[0] + first_C)

    return _call(kernel, [(CHUNK, CHUNK), (CHUNK,)], log_decay_NBHC, beta_NBHC)


def _save(log_decay_NBHC, beta_NBHC):
    intra_NBHCC, enter_NBHC = _weights(log_decay_NBHC, beta_NBHC)
    return (intra_NBHCC, enter_NBHC), (log_decay_NBHC, beta_NBHC, enter_NBHC)


def _gradients(saved, cotangents):
    def kernel(ones_s, parts_s, log_decay_s, beta_s, enter_s, dintra_s, denter_s):
        decay_CC = _decay(_between(log_decay_s, ones_s, parts_s))
        plgpu.commit_smem()  # all warps are past the product
        tiles.store_parts(tiles.split_parts(tiles.tile(dintra_s) * decay_CC, PARTS, HALF), parts_s)
        plgpu.commit_smem()
        later_CC = _product(ones_s.transpose((1, 0)), parts_s)  # of token j (row), t (column): j <= t
        pairs_CC, dsince_CC = later_CC * _per_column(beta_s), _per_column(enter_s) * _per_column(denter_s)
        dlog_decay_C = jnp.sum(jnp.where(_token(1) < _token(0), pairs_CC, dsince_CC), axis=1)
        return dlog_decay_C, jnp.sum(jnp.where(_token(1) == _token(0), later_CC, 0.0), axis=1)

    return _call(kernel, [(CHUNK,), (CHUNK,)], *saved, *cotangents)


_weights.defvjp(_save, _gradients)


def _between(log_decay_s, ones_s, parts_s):
    """The sum of what lies between tokens s (column) and t (row); 0 for s > t. Leaves the triangle j <= t in ones_s.

    It is in shared memory because ptxas moves constants behind the matrix instruction that reads them from registers.
    """
    ones_s[...] = _ones(_token(1) <= _token(0))
    after_CC = _ones(_token(1) < _token(0))
    parts_C = tiles.split_parts(tiles.untiled(log_decay_s, ROWS.reduce(1)), PARTS, HALF)
    tiles.store_parts([after_CC * tiles.per_row(part_C.astype(HALF), CHUNK) for part_C in parts_C], parts_s)
    plgpu.commit_smem()
    return _product(ones_s, parts_s)


def _decay(between_CC):
    """What is left of token s at token t; 0 for s > t."""
    return jnp.where(_token(1) <= _token(0), jnp.exp(between_CC), 0.0)


def _product(ones_s, parts_s):
    return tiles.product((CHUNK, CHUNK), *((ones_s, part) for part in parts_s))


def _ones(where_CC):
    return jnp.where(where_CC, 1.0, 0.0).astype(HALF)


def _token(axis):
    """The number of the row or of the column."""
    return plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), axis, layout=ROWS)


def _per_column(x_s):
    return tiles.per_column(tiles.untiled(x_s, ROWS.reduce(0)), CHUNK)


def _call(kernel, results, *arrays):
    """What `kernel` makes of each chunk's part of `arrays`, in shared memory; [N, B, H, ...] all of them."""

    def weights_of_chunk(arrays, results, arrays_s, ones_s, parts_s, loaded):
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
