"""The states that enter each chunk of a linear recurrence with one decay per head, on TPUs; the gradients need them.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, HALF


def states_tpu(
    k_BTHK: jax.Array, v_BTHV: jax.Array, weights: ChunkWeights, initial_BHKV: jax.Array, *, dtype: DTypeLike = HALF
) -> jax.Array:
    """Returns the state that enters each chunk, [N, B, H, K, V] in `dtype`.

    Args:
      k_BTHK, v_BTHV: keys and values, bfloat16, with T = N C.
      weights: float32.
      initial_BHKV: the state that enters the first chunk, float32.
      dtype: bfloat16 or float32; float32 states are correct to 16 bits.
    """
    grid = tiles.grid(k_BTHK, v_BTHV)
    key_size, value_size = initial_BHKV.shape[2:]
    parts = tiles.part_count(dtype)

    def kernel(k, v, leave, enter, initial, entering, state):
        """Stores the states that enter one chunk of a group of heads, and advances them in VMEM."""
        tiles.begin_state(state, initial)
        for head in range(grid.group):
            k_CK, v_CV = k[tiles.lanes(head, key_size)], v[tiles.lanes(head, value_size)]
            carry_11 = enter[head, :, CHUNK - 1 :]
            entering[head] = state[head].astype(dtype)
            state[head] = tiles.advance_state(state[head], k_CK, v_CV, leave[head], carry_11, parts=parts)

    return pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[
            *map(grid.tokens, (key_size, value_size)),
            *[grid.of_chunk(1, CHUNK)] * 2,
            grid.of_row(key_size, value_size),
        ],
        out_specs=grid.of_chunk(key_size, value_size),
        out_shape=tiles.out(grid.chunks, *initial_BHKV.shape, dtype=dtype),
        scratch_shapes=[pltpu.VMEM((grid.group, key_size, value_size), initial_BHKV.dtype)],
        compiler_params=tiles.COMPILER,
    )(
        *map(tiles.flat, (k_BTHK, v_BTHV)),
        weights.intra_NBHCC[..., -1:, :],
        weights.enter_NBHC[..., None, :],
        initial_BHKV,
    )
