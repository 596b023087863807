"""A linear recurrence with one decay per head and its readout, on TPUs: one pass in which the states never leave VMEM.

    o_t = enter_t S^T q_t + sum_s intra_ts (q_t . k_s) v_s          S' = carry S + sum_s leave_s k_s v_s^T

S enters a chunk and S' leaves it; carry and leave are the last entries of enter and intra (`chunks.ChunkWeights`). The
gradient of q is a readout too, `forward_tpu(do, v, k, ...)`: it reads S^T, whose recurrence is that of S with k and v
exchanged.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, HALF


def forward_tpu(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    v_BTHV: jax.Array,
    weights: ChunkWeights,
    initial_BHKV: jax.Array,
    *,
    parts: int = 1,
    dtype: DTypeLike = HALF,
) -> tuple[jax.Array, jax.Array]:
    """Computes the outputs and the last state. T is a multiple of C.

    Args:
      q_BTHK: queries, bfloat16 or float32.
      k_BTHK, v_BTHV: keys and values, bfloat16.
      weights: float32.
      initial_BHKV: the state that enters the first chunk, float32.
      parts: the number of bfloat16 parts, of 8 bits each, in which states and float32 queries are multiplied.
      dtype: that of the outputs.

    Returns:
      (o [B, T, H, V] in `dtype`, the state after the last chunk [B, H, K, V] float32).
    """
    grid = tiles.grid(k_BTHK, v_BTHV)
    key_size, value_size = initial_BHKV.shape[2:]

    def kernel(q, k, v, intra, enter, initial, o, state):
        """Computes one chunk of a group of heads; `state` stays in VMEM from one chunk to the next."""
        tiles.begin_state(state, initial)
        for head in range(grid.group):
            keys, values = (tiles.lanes(head, size) for size in (key_size, value_size))
            q_parts, k_CK, v_CV, state_KV = tiles.split_parts(q[keys], parts), k[keys], v[values], state[head]
            leave_1C, carry_11 = intra[head, CHUNK - 1 :], enter[head, :, CHUNK - 1 :]
            scores_CC = tiles.product(q_parts, [k_CK], b_transposed=True) * intra[head]
            inside_CV = tiles.dot(scores_CC.astype(HALF), v_CV)
            before_CV = tiles.product(q_parts, tiles.split_parts(state_KV, parts))
            o[values] = (inside_CV + tiles.column(enter[head]) * before_CV).astype(o.dtype)
            state[head] = tiles.advance_state(state_KV, k_CK, v_CV, leave_1C, carry_11, parts=parts)

    of_state = grid.of_row(key_size, value_size)
    o_BTW, final_BHKV = pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[
            *map(grid.tokens, (key_size, key_size, value_size)),
            grid.of_chunk(CHUNK, CHUNK),
            grid.of_chunk(1, CHUNK),
            of_state,
        ],
        out_specs=[grid.tokens(value_size), of_state],
        out_shape=[tiles.out(*tiles.flat(v_BTHV).shape, dtype=dtype), tiles.out(*initial_BHKV.shape)],
        compiler_params=tiles.COMPILER,
    )(*map(tiles.flat, (q_BTHK, k_BTHK, v_BTHV)), weights.intra_NBHCC, weights.enter_NBHC[..., None, :], initial_BHKV)
    return o_BTW.reshape(v_BTHV.shape), final_BHKV
