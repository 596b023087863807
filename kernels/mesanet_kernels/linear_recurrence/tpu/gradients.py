"""Gradients of a linear recurrence with one decay per head and its readout, on TPUs, in one pass from the last chunk.

The recurrence is the one of forward.py. dS, the cotangent of the state that leaves the chunk, stays in VMEM:

    dS of the previous chunk = carry dS + sum_t enter_t q_t do_t^T
    dq_t = enter_t S do_t + sum_s intra_ts (do_t . v_s) k_s         dintra_ts = (do_t . v_s) (q_t . k_s)
    dk_s = leave_s dS v_s + sum_t intra_ts (do_t . v_s) q_t         dleave_s = k_s . dS v_s
    dv_s = leave_s dS^T k_s + sum_t intra_ts (q_t . k_s) do_t       denter_t = q_t . S do_t        dcarry = <S, dS>

Several recurrences may share queries, keys and weights, as the two of Mesa do; the kernel then returns dv and dS for
each and the sum over the recurrences for everything else.

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
    """What distinguishes one recurrence from others with the same queries, keys and weights.

    Attributes:
      v_BTHV: values, bfloat16.
      do_BTHV: the cotangents of the outputs, bfloat16 or float32.
      states_NBHKV: the states that enter each chunk. With bfloat16 states, dS is multiplied in one bfloat16 part; with
        float32 states, both are multiplied in two parts, to 16 bits.
      dfinal_BHKV: the cotangent of the state after the last chunk, float32.
    """

    v_BTHV: jax.Array
    do_BTHV: jax.Array
    states_NBHKV: jax.Array
    dfinal_BHKV: jax.Array


class RecurrenceGradientsTpu(NamedTuple):
    """Gradients of queries, keys and values in bfloat16, of weights and initial states in float32.

    Attributes:
      dq_BTHK: a list of one array, or an empty one if the gradient of the queries was not asked for.
      dv_BTHV, dinitial_BHKV: one array for each recurrence.
    """

    dq_BTHK: list[jax.Array]
    dk_BTHK: jax.Array
    dweights: ChunkWeights
    dv_BTHV: list[jax.Array]
    dinitial_BHKV: list[jax.Array]


def gradients_tpu(
    q_BTHK: jax.Array,
    k_BTHK: jax.Array,
    weights: ChunkWeights,
    recurrences: tuple[RecurrenceInputsTpu, ...],
    *,
    queries: bool,
) -> RecurrenceGradientsTpu:
    """Returns the gradients. T is a multiple of C.

    Args:
      q_BTHK: queries, bfloat16 or float32.
      k_BTHK: keys, bfloat16.
      weights: float32.
      recurrences: what belongs to each recurrence alone.
      queries: whether the gradient of the queries is asked for.
    """
    grid = tiles.grid(k_BTHK, *(x.v_BTHV for x in recurrences), backwards=True)
    key_size = k_BTHK.shape[-1]

    def kernel(q, k, intra, enter, recurrences, dq, dk, dintra, denter, dv, dstates):
        """Computes the gradients of one chunk of a group of heads, and moves dS to the chunk before."""
        for recurrence, dstate in zip(recurrences, dstates, strict=True):
            tiles.begin_state(dstate, recurrence.dfinal_BHKV)
        for head in range(grid.group):
            keys = tiles.lanes(head, key_size)
            q_CK, k_CK, intra_CC, enter_1C = q[keys], k[keys], intra[head], enter[head]
            leave_1C, carry_11 = intra_CC[CHUNK - 1 :], enter_1C[:, CHUNK - 1 :]
            enter_C1, leave_C1 = tiles.column(enter_1C), tiles.column(leave_1C)
            loaded = [_load(recurrence, dstate, head) for recurrence, dstate in zip(recurrences, dstates, strict=True)]

            q_parts = tiles.split_parts(q_CK, 2)
            scores_CC = tiles.product(q_parts, [k_CK], b_transposed=True)
            dscores_CC = _total(tiles.product(x.do_parts, [x.v_CV], b_transposed=True) for x in loaded)
            weighted_CC, dweighted_CC = (scores_CC * intra_CC).astype(HALF), (dscores_CC * intra_CC).astype(HALF)
            from_state_CK = _total(tiles.product(x.do_parts, x.state_parts, b_transposed=True) for x in loaded)
            from_later_CK = _total(tiles.product([x.v_CV], x.dstate_parts, b_transposed=True) for x in loaded)
            for dq_of_heads in dq:
                dq_of_heads[keys] = (tiles.dot(dweighted_CC, k_CK) + enter_C1 * from_state_CK).astype(HALF)
            inside_CK = tiles.product([dweighted_CC], q_parts, a_transposed=True)
            dk[keys] = (inside_CK + leave_C1 * from_later_CK).astype(HALF)

            # The last row of intra is also `leave`, and the last entry of enter is also `carry`.
            dintra[head] = dscores_CC * scores_CC
            dintra[head, CHUNK - 1 :] += tiles.row(jnp.sum(k_CK * from_later_CK, axis=1, keepdims=True))
            denter[head] = tiles.row(jnp.sum(q_CK * from_state_CK, axis=1, keepdims=True))
            denter[head, :, CHUNK - 1 :] += _total(
                jnp.sum(x.state_KV * x.dstate_KV, axis=(0, 1), keepdims=True) for x in loaded
            )
            for x, dv_of_heads, dstate in zip(loaded, dv, dstates, strict=True):
                inside_CV = tiles.product([weighted_CC], x.do_parts, a_transposed=True)
                written_CV = tiles.product([k_CK], x.dstate_parts)
                dv_of_heads[tiles.lanes(head, dstate.shape[-1])] = (inside_CV + leave_C1 * written_CV).astype(HALF)
                dstate[head] = tiles.advance_state(
                    x.dstate_KV, q_CK, x.do_CV, enter_1C, carry_11, parts=len(x.dstate_parts)
                )

    of_keys, of_weights = grid.tokens(key_size), [grid.of_chunk(CHUNK, CHUNK), grid.of_chunk(1, CHUNK)]
    of_recurrences = tuple(_blocks(grid, *x.dfinal_BHKV.shape[2:]) for x in recurrences)
    enter_NBH1C = weights.enter_NBHC[..., None, :]
    flat_recurrences = tuple(
        x._replace(v_BTHV=tiles.flat(x.v_BTHV), do_BTHV=tiles.flat(x.do_BTHV)) for x in recurrences
    )
    of_key_tokens = tiles.out(*tiles.flat(k_BTHK).shape, dtype=HALF)
    dq, dk_BTW, dintra_NBHCC, denter_NBH1C, dv, dinitial_BHKV = pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[of_keys, of_keys, *of_weights, of_recurrences],
        out_specs=[
            [of_keys] * queries,
            of_keys,
            *of_weights,
            [x.v_BTHV for x in of_recurrences],
            [x.dfinal_BHKV for x in of_recurrences],
        ],
        out_shape=[
            [of_key_tokens] * queries,
            of_key_tokens,
            tiles.out(*weights.intra_NBHCC.shape),
            tiles.out(*enter_NBH1C.shape),
            [tiles.out(*x.v_BTHV.shape, dtype=HALF) for x in flat_recurrences],
            [tiles.out(*x.dfinal_BHKV.shape) for x in recurrences],
        ],
        compiler_params=tiles.COMPILER,
    )(*map(tiles.flat, (q_BTHK, k_BTHK)), weights.intra_NBHCC, enter_NBH1C, flat_recurrences)
    return RecurrenceGradientsTpu(
        [x.reshape(q_BTHK.shape) for x in dq],
        dk_BTW.reshape(k_BTHK.shape),
        ChunkWeights(dintra_NBHCC, denter_NBH1C[..., 0, :]),
        [x.reshape(recurrence.v_BTHV.shape) for x, recurrence in zip(dv, recurrences, strict=True)],
        dinitial_BHKV,
    )


def _blocks(grid, key_size, value_size):
    """Returns which block of each array of a recurrence a grid step sees."""
    of_values = grid.tokens(value_size)
    return RecurrenceInputsTpu(
        of_values, of_values, grid.of_chunk(key_size, value_size), grid.of_row(key_size, value_size)
    )


class _Loaded(NamedTuple):
    """The values of one head of a recurrence, and the bfloat16 parts in which they are multiplied."""

    v_CV: jax.Array
    do_CV: jax.Array
    state_KV: jax.Array
    dstate_KV: jax.Array
    do_parts: list
    state_parts: list
    dstate_parts: list


def _load(recurrence, dstate, head):
    """Returns the `_Loaded` of a head, from a grid step's blocks of a recurrence."""
    values = tiles.lanes(head, dstate.shape[-1])
    arrays = recurrence.v_BTHV[values], recurrence.do_BTHV[values], recurrence.states_NBHKV[head], dstate[head]
    parts = tiles.part_count(recurrence.states_NBHKV.dtype)
    return _Loaded(*arrays, *(tiles.split_parts(x, parts) for x in arrays[1:]))


def _total(terms):
    """Returns the sum of the terms. Python's `sum` begins with a 0, whose addition costs about 100 cycles."""
    return functools.reduce(operator.add, terms)
