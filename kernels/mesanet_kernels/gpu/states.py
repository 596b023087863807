"""The states that enter each chunk of a linear recurrence with a scalar decay, on NVIDIA Hopper.

    S_0 = initial          S_{n+1} = carry_n S_n + sum_s weight_ns k_ns v_ns^T

One warpgroup carries 64 columns of one head's state through all chunks, in float32 registers, while the copy engine
fetches the chunks ahead. `backwards` walks from the last chunk to the first: the recurrence of the states' cotangents
is the same one with other names (keys q, weights of the entering state, values do).

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, D columns of a block.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.gpu import tiles
from mesanet_kernels.gpu.tiles import BLOCK, CHUNK

STAGES = 2  # chunks in shared memory: one computed, the others on their way


def states(
    k_parts, v_parts, weight_NBHC, carry_NBH, initial_BHKV, *, backwards=False, factors=1, stored=(jnp.bfloat16,)
):
    """All S_n and the last one.

    Args:
      k_parts, v_parts: bfloat16 [B,T,H,K] and [B,T,H,V], T = N C; keys and values are the sums of their parts.
      factors: the parts in which the weighted values are multiplied: 8 bits of them each.
      stored: the dtypes of the parts that sum to S_n. float16 gives 11 bits each, of numbers that are the caller's to
        keep within its range.

    Returns:
      (a tuple of [N,B,H,K,V], one a part; the last state [B,H,K,V] float32).
    """
    count, batch, heads, _ = weight_NBHC.shape
    key_size, value_size = initial_BHKV.shape[2:]
    half = k_parts[0].dtype

    def kernel(k, v, weight, carry, initial, states, final, k_s, v_s, weight_s, weighted_s, state_s, loaded):
        b, h, block = (lax.axis_index(name) for name in ("row", "head", "block"))
        columns = pl.ds(block * BLOCK, BLOCK)
        chunk_of = lambda step: count - 1 - step if backwards else step

        def fetch_chunk(step):
            n, slot = chunk_of(step), lax.rem(step, STAGES)
            tokens = pl.ds(n * CHUNK, CHUNK)
            sources = [x.at[b, tokens, h] for x in k] + [x.at[b, tokens, h, columns] for x in v] + [weight.at[n, b, h]]
            tiles.fetch(zip(sources, [x.at[slot] for x in (*k_s, *v_s, weight_s)]), loaded.at[slot])

        for step in range(min(STAGES - 1, count)):
            fetch_chunk(jnp.int32(step))

        def advance(step, state_KD):
            n, slot = chunk_of(step), lax.rem(step, STAGES)
            carried = carry[n, b, h]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            tiles.store(tiles.cut(state_KD, len(stored), stored[0]), state_s)
            plgpu.barrier_wait(loaded.at[slot])
            weight_CD = tiles.per_row(tiles.untiled(weight_s.at[slot], tiles.ROWS.reduce(1)), BLOCK)
            weighted_CD = weight_CD * tiles.total([x.at[slot] for x in v_s])
            tiles.store(tiles.cut(weighted_CD, factors, half), weighted_s)
            plgpu.commit_smem()
            for source, target in zip(state_s, states):
                plgpu.copy_smem_to_gmem(source, target.at[n, b, h, :, columns])

            # Here the warps are past the step before: its slot is free.
            @pl.when(step + STAGES - 1 < count)
            def _():
                fetch_chunk(step + STAGES - 1)

            keys_KC = tiles.transposed(x.at[slot] for x in k_s)
            update_KD = tiles.product((key_size, BLOCK), *tiles.crossed(keys_KC, weighted_s))
            return carried * state_KD + update_KD

        final_KD = lax.fori_loop(0, count, advance, tiles.untiled(initial.at[b, h, :, columns]))
        final[b, h, :, columns] = final_KD
        plgpu.wait_smem_to_gmem(0)

    states_NBHKV = (count, batch, heads, key_size, value_size)
    return plgpu.kernel(
        kernel,
        out_type=(
            tuple(jax.ShapeDtypeStruct(states_NBHKV, dtype) for dtype in stored),
            jax.ShapeDtypeStruct(initial_BHKV.shape, jnp.float32),
        ),
        grid=(batch, heads, value_size // BLOCK),
        grid_names=("row", "head", "block"),
        scratch_types=[
            [tiles.shared(STAGES, CHUNK, key_size, dtype=half) for _ in k_parts],
            [tiles.shared(STAGES, CHUNK, BLOCK, dtype=half) for _ in v_parts],
            plgpu.SMEM((STAGES, CHUNK), jnp.float32),
            [tiles.shared(CHUNK, BLOCK, dtype=half) for _ in range(factors)],
            [tiles.shared(key_size, BLOCK, dtype=dtype) for dtype in stored],
            plgpu.Barrier(num_arrivals=len(k_parts) + len(v_parts) + 1, num_barriers=STAGES),
        ],
        compiler_params=tiles.COMPILER,
    )(k_parts, v_parts, weight_NBHC, carry_NBH, initial_BHKV)
