"""Gradients of a linear recurrence with a scalar decay and its readout, on TPUs: one pass, from the last chunk to the first.

The recurrence is forward.py's. dS, the cotangent of the state that leaves the chunk, stays in VMEM:

    dS of the chunk before = carry dS + sum_t enter_t q_t do_t^T
    dq_t = enter_t S do_t + sum_s intra_ts (do_t . v_s) k_s         dintra_ts = (do_t . v_s) (q_t . k_s)
    dk_s = leave_s dS v_s + sum_t intra_ts (do_t . v_s) q_t         dleave_s = k_s . dS v_s
    dv_s = leave_s dS^T k_s + sum_t intra_ts (q_t . k_s) do_t       denter_t = q_t . S do_t        dcarry = <S, dS>

One set of keys may carry several memories: all but dv and dS sum over them.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, HALF


class RecurrenceInputsTpu(NamedTuple):
    """What was written and read at the same keys and queries."""

    v_BTHV: jax.Array  # bfloat16
    do_BTHV: jax.Array  # bfloat16 or float32
    states_NBHKV: jax.Array  # that enter each chunk; bfloat16, or float32: then dS too is multiplied to 16 bits
    dfinal_BHKV: jax.Array  # float32


class RecurrenceGradientsTpu(NamedTuple):
    """Of tokens bfloat16, of weights and initial states float32."""

    dq_BTHK: list  # one array, or none
    dk_BTHK: jax.Array
    weights: ChunkWeights
    dv_BTHV: list  # one a memory
    dinitial_BHKV: list  # one a memory


def gradients_tpu(q_BTHK, k_BTHK, weights, memories, *, queries):
    """The `RecurrenceGradientsTpu`, with T = N C; of q only where `queries` are asked for.

    Args:
      q_BTHK: bfloat16 or float32; k_BTHK: bfloat16; memories: a tuple of `RecurrenceInputsTpu`.
    """
    grid = tiles.grid(k_BTHK, *(memory.v_BTHV for memory in memories), backwards=True)
    key_size = k_BTHK.shape[-1]

    def kernel(q, k, intra, enter, memories, dq, dk, dintra, denter, dv, dstates):
        for memory, dstate in zip(memories, dstates, strict=True):
            tiles.begin_state(dstate, memory.dfinal_BHKV)
        for head in range(grid.group):
            keys = tiles.lanes(head, key_size)
            q_CK, k_CK, intra_CC, enter_1C = q[keys], k[keys], intra[head], enter[head]
            leave_1C, carry_11 = intra_CC[CHUNK - 1 :], enter_1C[:, CHUNK - 1 :]
            enter_C1, leave_C1 = tiles.column(enter_1C), tiles.column(leave_1C)
            read = [_read(memory, dstate, head) for memory, dstate in zip(memories, dstates, strict=True)]

            q_parts = tiles.split_parts(q_CK, 2)
            scores_CC = tiles.product(q_parts, [k_CK], b_transposed=True)
            dscores_CC = _total(tiles.product(x.do_parts, [x.v_CV], b_transposed=True) for x in read)
            weighted_CC, dweighted_CC = (scores_CC * intra_CC).astype(HALF), (dscores_CC * intra_CC).astype(HALF)
            from_state_CK = _total(tiles.product(x.do_parts, x.state_parts, b_transposed=True) for x in read)
            from_later_CK = _total(tiles.product([x.v_CV], x.dstate_parts, b_transposed=True) for x in read)
            for dq_of_heads in dq:
                dq_of_heads[keys] = (tiles.dot(dweighted_CC, k_CK) + enter_C1 * from_state_CK).astype(HALF)
            inside_CK = tiles.product([dweighted_CC], q_parts, a_transposed=True)
            dk[keys] = (inside_CK + leave_C1 * from_later_CK).astype(HALF)

            # The last row of intra is also what leaves the chunk, the last number of enter what it carries.
            dintra[head] = dscores_CC * scores_CC
            dintra[head, CHUNK - 1 :] += tiles.row(jnp.sum(k_CK * from_later_CK, axis=1, keepdims=True))
            denter[head] = tiles.row(jnp.sum(q_CK * from_state_CK, axis=1, keepdims=True))
            denter[head, :, CHUNK - 1 :] += _total(
                jnp.sum(x.state_KV * x.dstate_KV, axis=(0, 1), keepdims=True) for x in read
            )
            for x, dv_of_heads, dstate in zip(read, dv, dstates, strict=True):
                inside_CV = tiles.product([weighted_CC], x.do_parts, a_transposed=True)
                written_CV = tiles.product([k_CK], x.dstate_parts)
                dv_of_heads[tiles.lanes(head, dstate.shape[-1])] = (inside_CV + leave_C1 * written_CV).astype(HALF)
                dstate[head] = tiles.advance_state(
                    x.dstate_KV, q_CK, x.do_CV, enter_1C, carry_11, parts=len(x.dstate_parts)
                )

    of_keys, of_weights = grid.tokens(key_size), [grid.of_chunk(CHUNK, CHUNK), grid.of_chunk(1, CHUNK)]
    of_memories = tuple(_blocks(grid, *memory.dfinal_BHKV.shape[2:]) for memory in memories)
    enter_NBH1C = weights.enter_NBHC[..., None, :]
    flat_memories = tuple(
        memory._replace(v_BTHV=tiles.flat(memory.v_BTHV), do_BTHV=tiles.flat(memory.do_BTHV)) for memory in memories
    )
    of_key_tokens = tiles.out(*tiles.flat(k_BTHK).shape, dtype=HALF)
    dq, dk_BTW, dintra_NBHCC, denter_NBH1C, dv, dinitial_BHKV = pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[of_keys, of_keys, *of_weights, of_memories],
        out_specs=[
            [of_keys] * queries,
            of_keys,
            *of_weights,
            [m.v_BTHV for m in of_memories],
            [m.dfinal_BHKV for m in of_memories],
        ],
        out_shape=[
            [of_key_tokens] * queries,
            of_key_tokens,
            tiles.out(*weights.intra_NBHCC.shape),
            tiles.out(*enter_NBH1C.shape),
            [tiles.out(*memory.v_BTHV.shape, dtype=HALF) for memory in flat_memories],
            [tiles.out(*memory.dfinal_BHKV.shape) for memory in memories],
        ],
        compiler_params=tiles.COMPILER,
    )(*map(tiles.flat, (q_BTHK, k_BTHK)), weights.intra_NBHCC, enter_NBH1C, flat_memories)
    return RecurrenceGradientsTpu(
        [x.reshape(q_BTHK.shape) for x in dq],
        dk_BTW.reshape(k_BTHK.shape),
        ChunkWeights(dintra_NBHCC, denter_NBH1C[..., 0, :]),
        [x.reshape(memory.v_BTHV.shape) for x, memory in zip(dv, memories, strict=True)],
        dinitial_BHKV,
    )


def _blocks(grid, key_size, value_size):
    """The blocks of a memory that a step sees."""
    of_values = grid.tokens(value_size)
    return RecurrenceInputsTpu(
        of_values, of_values, grid.of_chunk(key_size, value_size), grid.of_row(key_size, value_size)
    )


class _Read(NamedTuple):
    """What a head has of a memory, and the parts in which it is multiplied."""

    v_CV: jax.Array
    do_CV: jax.Array
    state_KV: jax.Array
    dstate_KV: jax.Array
    do_parts: list
    state_parts: list
    dstate_parts: list


def _read(memory, dstate, head):
    values = tiles.lanes(head, dstate.shape[-1])
    arrays = memory.v_BTHV[values], memory.do_BTHV[values], memory.states_NBHKV[head], dstate[head]
    parts = tiles.part_count(memory.states_NBHKV.dtype)
    return _Read(*arrays, *(tiles.split_parts(x, parts) for x in arrays[1:]))


def _total(terms):
    """Their sum. Python's begins with a zero, which costs the compiler 100 cycles."""
    return functools.reduce(operator.add, terms)
