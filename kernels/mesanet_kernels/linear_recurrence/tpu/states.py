"""The states that enter each chunk of a linear recurrence with a scalar decay, on TPUs: what the gradients read.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, HALF


def states_tpu(k_BTHK, v_BTHV, weights, initial_BHKV, *, dtype=HALF):
    """[N,B,H,K,V] in `dtype`, of bfloat16 keys and values with T = N C; float32 states are right to 16 bits."""
    grid = tiles.grid(k_BTHK, v_BTHV)
    key_size, value_size = initial_BHKV.shape[2:]
    parts = tiles.part_count(dtype)

    def kernel(k, v, leave, enter, initial, entering, state):
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
