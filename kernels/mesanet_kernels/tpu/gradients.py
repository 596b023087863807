"""Gradients of a linear recurrence with a scalar decay and its readout, on TPUs: one pass, from the last chunk to the first.

The recurrence is forward.py's. dS, the cotangent of the state that leaves the chunk, stays in VMEM:

    dS of the chunk before = carry dS + sum_t enter_t q_t do_t^T
    dq_t = enter_t S do_t + sum_s intra_ts (do_t . v_s) k_s         dintra_ts = (do_t . v_s) (q_t . k_s)
    dk_s = leave_s dS v_s + sum_t intra_ts (do_t . v_s) q_t         dleave_s = k_s . dS v_s
    dv_s = leave_s dS^T k_s + sum_t intra_ts (q_t . k_s) do_t       denter_t = q_t . S do_t        dcarry = <S, dS>

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl

from mesanet_kernels.chunks import ChunkWeights
from mesanet_kernels.tpu import tiles
from mesanet_kernels.tpu.tiles import CHUNK, HALF


def gradients(q_BTHK, k_BTHK, v_BTHV, weights, states_NBHKV, do_BTHV, dfinal_BHKV):
    """Of q, k, v (bfloat16), the `ChunkWeights` and the initial state, given bfloat16 inputs with T = N C.

    states_NBHKV: those that enter each chunk, bfloat16.
    """
    grid = tiles.grid(k_BTHK, v_BTHV, backwards=True)
    key_size, value_size = dfinal_BHKV.shape[2:]

    def kernel(q, k, v, do, intra, enter, states, dfinal, dq, dk, dv, dintra, denter, dstate):
        tiles.begin(dstate, dfinal)
        for head in range(grid.group):
            keys, values = (tiles.lanes(head, size) for size in (key_size, value_size))
            q_CK, k_CK, v_CV, do_CV = q[keys], k[keys], v[values], do[values]
            intra_CC, enter_1C = intra[head], enter[head]
            leave_1C, carry_11 = intra_CC[CHUNK - 1 :], enter_1C[:, CHUNK - 1 :]
            enter_C1, leave_C1 = tiles.column(enter_1C), tiles.column(leave_1C)
            state_KV, dstate_KV = states[head], dstate[head]
            half_dstate_KV = dstate_KV.astype(HALF)

            scores_CC = tiles.dot(q_CK, k_CK, b_transposed=True)
            dscores_CC = tiles.dot(do_CV, v_CV, b_transposed=True)
            weighted_CC, dweighted_CC = (scores_CC * intra_CC).astype(HALF), (dscores_CC * intra_CC).astype(HALF)
            from_state_CK = tiles.dot(do_CV, state_KV, b_transposed=True)
            from_later_CK = tiles.dot(v_CV, half_dstate_KV, b_transposed=True)
            dq[keys] = (tiles.dot(dweighted_CC, k_CK) + enter_C1 * from_state_CK).astype(HALF)
            dk[keys] = (tiles.dot(dweighted_CC, q_CK, a_transposed=True) + leave_C1 * from_later_CK).astype(HALF)
            written_CV = tiles.dot(k_CK, half_dstate_KV)
            dv[values] = (tiles.dot(weighted_CC, do_CV, a_transposed=True) + leave_C1 * written_CV).astype(HALF)

            # The last row of intra is also what leaves the chunk, the last number of enter what it carries.
            dleave_1C = tiles.row(jnp.sum(k_CK * from_later_CK, axis=1, keepdims=True))
            denter_1C = tiles.row(jnp.sum(q_CK * from_state_CK, axis=1, keepdims=True))
            dcarry_11 = jnp.sum(state_KV * dstate_KV, axis=(0, 1), keepdims=True)
            dintra[head] = dscores_CC * scores_CC
            dintra[head, CHUNK - 1 :] += dleave_1C
            denter[head] = denter_1C
            denter[head, :, CHUNK - 1 :] += dcarry_11
            dstate[head] = tiles.advanced(dstate_KV, q_CK, do_CV, enter_1C, carry_11)

    of_weights = [grid.of_chunk(CHUNK, CHUNK), grid.of_chunk(1, CHUNK)]
    of_tokens = [*map(grid.tokens, (key_size, key_size, value_size))]
    of_state = grid.of_row(key_size, value_size)
    enter_NBH1C = weights.enter_NBHC[..., None, :]
    sources = *map(tiles.flat, (q_BTHK, k_BTHK, v_BTHV, do_BTHV)), weights.intra_NBHCC, enter_NBH1C
    *found, dintra_NBHCC, denter_NBH1C, dinitial_BHKV = pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[
            *of_tokens,
            grid.tokens(value_size),
            *of_weights,
            grid.of_chunk(key_size, value_size),
            of_state,
        ],
        out_specs=[*of_tokens, *of_weights, of_state],
        out_shape=[
            *(tiles.out(*x.shape, dtype=HALF) for x in sources[:3]),
            *(tiles.out(*x.shape) for x in (*sources[4:], dfinal_BHKV)),
        ],
        compiler_params=tiles.COMPILER,
    )(*sources, states_NBHKV, dfinal_BHKV)
    dqkv = (x.reshape(like.shape) for x, like in zip(found, (q_BTHK, k_BTHK, v_BTHV), strict=True))
    return *dqkv, ChunkWeights(dintra_NBHCC, denter_NBH1C[..., 0, :]), dinitial_BHKV
