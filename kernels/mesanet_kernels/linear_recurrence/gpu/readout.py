"""What queries read from the states of a linear recurrence with one decay per head, on NVIDIA Hopper.

    o_t = enter_t S^T q_t + sum_s intra_ts (q_t . k_s) v_s

One warpgroup computes one chunk. The gradient of the queries is a readout too: its queries are the cotangents of o, its
keys are the values, its values are the keys, and S is transposed (docs/mesa.md, "Chunks").

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import CHUNK


def readout_gpu(
    q_parts: tuple[jax.Array, ...],
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    weights: ChunkWeights,
    states_parts: tuple[jax.Array, ...],
    *,
    transposed: bool = False,
    results: int = 1,
    scale: float = 1.0,
) -> tuple[jax.Array, ...]:
    """Returns `scale` times o as a tuple of `results` bfloat16 arrays [B, T, H, V], whose sum it is.

    Args:
      q_parts: a tuple of bfloat16 arrays [B, T, H, K] with T = N C, whose sum is the queries.
      k_BTHK, v_BTHV: keys and values, bfloat16.
      weights: float32.
      states_parts: a tuple of bfloat16 arrays [N, B, H, K, V], or [N, B, H, V, K] if `transposed`, whose sum is the
        states that enter each chunk.
    """
    intra_NBHCC, enter_NBHC = weights
    count, batch, heads, _ = enter_NBHC.shape
    key_size, value_size = k_BTHK.shape[-1], v_BTHV.shape[-1]

    def readout_of_chunk(q, k, v, intra, enter, states, o, q_s, k_s, v_s, intra_s, enter_s, state_s, more_s, loaded):
        """Computes the outputs of one chunk of one head."""
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens = pl.ds(n * CHUNK, CHUNK)
        sources = [x.at[b, tokens, h] for x in (*q, k, v)] + [x.at[n, b, h] for x in (intra, enter, *states)]
        tiles.fetch(zip(sources, (*q_s, k_s, v_s, intra_s, enter_s, *state_s)), loaded)
        plgpu.barrier_wait(loaded)

        scores_CC = tiles.product((CHUNK, CHUNK), *tiles.cross_products(q_s, tiles.transposed([k_s]))) * tiles.tile(
            intra_s
        )
        inside_CV = tiles.product((CHUNK, value_size), (scores_CC.astype(v_s.dtype), v_s))
        states_KV = tiles.transposed(state_s) if transposed else state_s
        before_CV = tiles.product((CHUNK, value_size), *tiles.cross_products(q_s, states_KV))
        o_CV = inside_CV + tiles.per_row(tiles.untiled(enter_s, tiles.ROWS.reduce(1)), value_size) * before_CV
        plgpu.commit_smem()  # all warps have read the values, whose memory the outputs take
        o_s = (v_s, *more_s)
        tiles.store_parts(tiles.split_parts(scale * o_CV, results, v_s.dtype), o_s)
        plgpu.commit_smem()
        for source, target in zip(o_s, o):
            plgpu.copy_smem_to_gmem(source, target.at[b, tokens, h])
        plgpu.wait_smem_to_gmem(0)

    half = v_BTHV.dtype
    parts = len(q_parts) + len(states_parts)
    return tiles.kernel(
        readout_of_chunk,
        out_type=(tuple(jax.ShapeDtypeStruct(v_BTHV.shape, half) for _ in range(results)),),
        grid=(batch, count, heads),
        grid_names=("row", "chunk", "head"),
        scratch_types=[
            [tiles.shared(CHUNK, key_size, dtype=half) for _ in q_parts],
            tiles.shared(CHUNK, key_size, dtype=half),
            tiles.shared(CHUNK, value_size, dtype=half),
            tiles.shared(CHUNK, CHUNK, dtype=jnp.float32),
            plgpu.SMEM((CHUNK,), jnp.float32),
            [tiles.shared(*x.shape[-2:], dtype=half) for x in states_parts],
            [tiles.shared(CHUNK, value_size, dtype=half) for _ in range(results - 1)],
            plgpu.Barrier(num_arrivals=parts + 4),
        ],
        compiler_params=tiles.COMPILER,
    )(q_parts, k_BTHK, v_BTHV, intra_NBHCC, enter_NBHC, states_parts)[0]
