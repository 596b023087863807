"""The states that enter each chunk of a linear recurrence with one decay per head, on NVIDIA Hopper.

    S_0 = initial          S_{n+1} = carry_n S_n + sum_s weight_ns k_ns v_ns^T

One warpgroup carries a block of 64 x 64 of the state of one head through all chunks, in float32 registers, while the
copy engine fetches the next chunks. With `backwards` it walks from the last chunk to the first: the cotangents of the
states follow the same recurrence, with the queries for keys, their cotangents for values, and the weights of the
entering state.

With few long rows, most of the GPU would be idle. Time is then cut into segments that run concurrently, twice: first to
compute what each segment adds to the state, then again from the state that enters it.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, D rows or columns of a block,
S segments.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import BLOCK, CHUNK

STAGES = 2  # chunks in shared memory: one is being used, the others are being fetched
PROGRAMS = 512  # programs that a GPU runs concurrently: about four on each SM
SHORTEST = 8  # fewest chunks of a segment


def states_gpu(
    k_parts,
    v_parts,
    weight_NBHC,
    carry_NBH,
    initial_BHKV,
    *,
    backwards=False,
    factors=1,
    stored=(jnp.bfloat16,),
    symmetric=False,
):
    """Computes the states S_n that enter each chunk, and the state after the last one.

    Args:
      k_parts, v_parts: tuples of bfloat16 arrays [B, T, H, K] and [B, T, H, V] with T = N C, whose sums are the keys
        and the values.
      weight_NBHC: the weight of each token in the state that leaves its chunk, float32.
      carry_NBH: the weight of the state that enters each chunk in the state that leaves it, float32.
      initial_BHKV: the state that enters the first chunk (the last chunk if `backwards`), float32.
      backwards: whether to walk from the last chunk to the first.
      factors: the number of bfloat16 parts, of 8 bits each, in which the weighted values are multiplied.
      stored: the dtypes of the parts whose sum is S_n. A float16 part has 11 bits; the caller must keep the states
        within the range of float16.
      symmetric: whether the states are symmetric and the caller reads no block below the diagonal. These blocks are
        then left uninitialised, except in the last state.

    Returns:
      (a tuple of arrays [N, B, H, K, V], one per part; the last state [B, H, K, V], float32).
    """
    count, batch, heads, _ = weight_NBHC.shape
    rows, columns = (range(size // BLOCK) for size in initial_BHKV.shape[2:])
    blocks = [(i, j) for i in rows for j in columns if i <= j or not symmetric]
    segments = _segments(count, batch * heads * len(blocks))
    run = functools.partial(
        _run, k_parts, v_parts, weight_NBHC, carry_NBH, blocks, backwards=backwards, factors=factors
    )
    initial_SBHKV = initial_BHKV[None]
    if segments > 1:
        _, added_SBHKV = run(jnp.zeros((segments, *initial_BHKV.shape), jnp.float32), stored=())
        initial_SBHKV = _entering(added_SBHKV, carry_NBH, initial_BHKV, backwards)
    parts_NBHKV, final_SBHKV = run(initial_SBHKV, stored=stored)
    final_BHKV = final_SBHKV[0 if backwards else -1]
    return parts_NBHKV, _mirrored(final_BHKV) if symmetric else final_BHKV


def _mirrored(state_BHKK):
    """Returns [B, H, K, K] with the blocks above the diagonal mirrored to those below it."""
    block_K = jnp.arange(state_BHKK.shape[-1]) // BLOCK
    return jnp.where(block_K[:, None] <= block_K, state_BHKK, state_BHKK.mT)


def _segments(count, programs):
    """Returns the number of segments for `count` chunks if each segment takes `programs` programs."""
    segments = 1
    while 2 * segments * programs <= PROGRAMS and count % (2 * segments) == 0 and count // (2 * segments) >= SHORTEST:
        segments *= 2
    return segments


def _entering(added_SBHKV, carry_NBH, initial_BHKV, backwards):
    """Returns the state that enters each segment [S, B, H, K, V], given what each adds to a zero state."""
    segments, *sizes = added_SBHKV.shape
    carry_SBH = jnp.prod(carry_NBH.reshape(segments, -1, *sizes[:2]), axis=1)
    states, state_BHKV = [None] * segments, initial_BHKV
    for s in range(segments)[:: -1 if backwards else 1]:
        states[s] = state_BHKV
        state_BHKV = carry_SBH[s, ..., None, None] * state_BHKV + added_SBHKV[s]
    return jnp.stack(states)


def _run(k_parts, v_parts, weight_NBHC, carry_NBH, blocks, initial_SBHKV, *, backwards, factors, stored):
    """Runs the kernel on all segments.

    Returns:
      (a tuple of [N, B, H, K, V], one per dtype in `stored`; the state that leaves each segment [S, B, H, K, V]).
    """
    count, batch, heads, _ = weight_NBHC.shape
    segments, *_, key_size, value_size = initial_SBHKV.shape
    half, steps = k_parts[0].dtype, count // segments

    def states_of_block(k, v, weight, carry, initial, states, final, k_s, v_s, weight_s, more_s, state_s, loaded):
        """Carries one block of one head's state through the chunks of one segment."""
        b, h, block, segment = (lax.axis_index(name) for name in ("row", "head", "block", "segment"))
        place = [sum(jnp.where(block == n, at[axis], 0) for n, at in enumerate(blocks)) for axis in (0, 1)]
        keys, values = (pl.ds(i * BLOCK, BLOCK) for i in place)

        def chunk_of(step):
            """Returns the number of the chunk that this segment computes in its step `step`."""
            return segment * steps + (steps - 1 - step if backwards else step)

        def fetch_chunk(step):
            """Starts copying the keys, values and weights of the chunk of `step` to its slot in shared memory."""
            n, slot = chunk_of(step), lax.rem(step, STAGES)
            tokens = pl.ds(n * CHUNK, CHUNK)
            sources = [x.at[b, tokens, h, part] for x_parts, part in ((k, keys), (v, values)) for x in x_parts]
            sources.append(weight.at[n, b, h])
            tiles.fetch(zip(sources, [x.at[slot] for x in (*k_s, *v_s, weight_s)]), loaded.at[slot])

        for step in range(min(STAGES - 1, steps)):
            fetch_chunk(jnp.int32(step))

        def advance(step, state_DD):
            """Stores the state that enters the chunk of `step` and returns the one that leaves it."""
            n, slot = chunk_of(step), lax.rem(step, STAGES)
            carried = carry[n, b, h]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if stored:
                tiles.store_parts(tiles.split_parts(state_DD, len(stored), stored[0]), state_s)
            plgpu.barrier_wait(loaded.at[slot])
            weight_CD = tiles.per_row(tiles.untiled(weight_s.at[slot], tiles.ROWS.reduce(1)), BLOCK)
            values_s = [x.at[slot] for x in v_s]
            weighted_CD = weight_CD * tiles.sum_parts(values_s)
            # The weighted values overwrite the values: with less memory per program, more programs run concurrently.
            weighted_s = [*values_s, *more_s][:factors]
            tiles.store_parts(tiles.split_parts(weighted_CD, factors, half), weighted_s)
            plgpu.commit_smem()
            for source, target in zip(state_s, states):
                plgpu.copy_smem_to_gmem(source, target.at[n, b, h, keys, values])

            # All warps have finished the previous step here, so its slot is free for the next chunk.
            @pl.when(step + STAGES - 1 < steps)
            def _():
                fetch_chunk(step + STAGES - 1)

            keys_DC = tiles.transposed(x.at[slot] for x in k_s)
            # The state is not the start of the product: the matrix unit truncates its sums, and a state is the result
            # of thousands of them.
            return carried * state_DD + tiles.product((BLOCK, BLOCK), *tiles.cross_products(keys_DC, weighted_s))

        first_DD = tiles.untiled(initial.at[segment, b, h, keys, values])
        final[segment, b, h, keys, values] = lax.fori_loop(0, steps, advance, first_DD)
        plgpu.wait_smem_to_gmem(0)

    states_NBHKV = (count, batch, heads, key_size, value_size)
    return tiles.kernel(
        states_of_block,
        out_type=(
            tuple(jax.ShapeDtypeStruct(states_NBHKV, dtype) for dtype in stored),
            jax.ShapeDtypeStruct(initial_SBHKV.shape, jnp.float32),
        ),
        grid=(batch, heads, len(blocks), segments),
        grid_names=("row", "head", "block", "segment"),
        scratch_types=[
            [tiles.shared(STAGES, CHUNK, BLOCK, dtype=half) for _ in k_parts],
            [tiles.shared(STAGES, CHUNK, BLOCK, dtype=half) for _ in v_parts],
            plgpu.SMEM((STAGES, CHUNK), jnp.float32),
            [tiles.shared(CHUNK, BLOCK, dtype=half) for _ in range(factors - len(v_parts))],
            [tiles.shared(BLOCK, BLOCK, dtype=dtype) for dtype in stored],
            plgpu.Barrier(num_arrivals=len(k_parts) + len(v_parts) + 1, num_barriers=STAGES),
        ],
        compiler_params=tiles.COMPILER,
    )(k_parts, v_parts, weight_NBHC, carry_NBH, initial_SBHKV)
