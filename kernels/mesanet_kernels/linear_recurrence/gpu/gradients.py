"""Gradients of a linear recurrence with one decay per head and of its readout, on NVIDIA Hopper.

    o_t = enter_t S^T q_t + sum_s intra_ts (q_t . k_s) v_s          S' = carry S + sum_s leave_s k_s v_s^T

S enters the chunk and S' leaves it. Given the cotangents do of o and dS of S',

    dv_s = sum_t intra_ts (q_t . k_s) do_t + leave_s dS^T k_s       dk_s = sum_t intra_ts (do_t . v_s) q_t + leave_s dS
    v_s dintra_ts = (do_t . v_s) (q_t . k_s)    denter_t = do_t . S^T q_t    dleave_s = k_s . dS v_s    dcarry = <S, dS>

dq is a readout (readout.py). Several recurrences may share queries, keys and weights, as the two of Mesa do; the kernel
then returns dv for each and the sum over the recurrences for everything else. One warpgroup computes one chunk.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, D columns of a block.
"""

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import BLOCK, CHUNK

BLOCK_SHAPE = CHUNK, BLOCK  # tokens and columns of a block of queries, keys or values


class RecurrenceInputsGpu(NamedTuple):
    """What distinguishes one recurrence from others with the same queries, keys and weights. All arrays are bfloat16.

    Attributes:
      v_BTHV: values.
      do_parts: a tuple of arrays [B, T, H, V], whose sum is the cotangents of the outputs.
      states_parts: a tuple of arrays [N, B, H, K, V], whose sum is the states that enter each chunk.
      dstates_parts: a tuple of arrays [N, B, H, K, V], whose sum is the cotangents of the states that leave each chunk.
    """

    v_BTHV: jax.Array
    do_parts: tuple[jax.Array, ...]
    states_parts: tuple[jax.Array, ...]
    dstates_parts: tuple[jax.Array, ...]


class RecurrenceGradientsGpu(NamedTuple):
    """Gradients of keys and values in bfloat16, of weights in float32.

    Attributes:
      dv_BTHV: one array for each recurrence.
      dcarry_NBHK: the gradient of the carry as one summand for each key channel; the caller sums over K.
    """

    dv_BTHV: tuple[jax.Array, ...]
    dk_BTHK: jax.Array
    dintra_NBHCC: jax.Array
    denter_NBHC: jax.Array
    dleave_NBHC: jax.Array
    dcarry_NBHK: jax.Array


def gradients_gpu(
    q_parts: tuple[jax.Array, ...],
    k_BTHK: jax.Array,
    weights: ChunkWeights,
    recurrences: tuple[RecurrenceInputsGpu, ...],
) -> RecurrenceGradientsGpu:
    """Returns the gradients of keys, values and weights.

    Args:
      q_parts: a tuple of bfloat16 arrays [B, T, H, K] with T = N C, whose sum is the queries.
      k_BTHK: keys, bfloat16.
      weights: float32.
      recurrences: what belongs to each recurrence alone.
    """
    intra_NBHCC, leave_NBHC = weights.intra_NBHCC, weights.leave_NBHC
    count, batch, heads, _ = leave_NBHC.shape
    size, half = k_BTHK.shape[-1], k_BTHK.dtype
    key_blocks = range(size // BLOCK)

    def gradients_of_chunk(q, k, intra, leave, recurrences, dv, dk, dintra, denter, dleave, dcarry, *scratch):
        """Computes the gradients of one chunk of one head."""
        blocks_s, zero_s, loaded, tokens_loaded, states_loaded, dstates_loaded = scratch
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens, columns = pl.ds(n * CHUNK, CHUNK), lambda j: pl.ds(BLOCK * j, BLOCK)

        def shared_blocks(zero):
            """Returns the blocks of shared memory by their use; `zero` is 0, and is added to every index.

            They are lists for (the parts of the queries, keys, weighted scores, values and cotangents of the outputs,
            states, cotangents of the states).
            """
            numbers = itertools.count()
            lists = [[blocks_s.at[next(numbers) + zero] for _ in range(count)] for count in counts_of_blocks]
            *q_s, k_s, (weighted_scores_s,), tokens_s, states_s, dstates_s = lists
            return q_s, k_s, weighted_scores_s, tokens_s, states_s, dstates_s

        q_s, k_s, weighted_scores_s, tokens_s, states_s, dstates_s = shared_blocks(0)

        def fetch_tokens(i, d):
            """Starts copying block d of the values and cotangents of the outputs of recurrence i."""
            parts = zip((recurrences[i].v_BTHV, *recurrences[i].do_parts), tokens_s)
            tiles.fetch([(x.at[b, tokens, h, columns(d)], x_s) for x, x_s in parts], tokens_loaded[i])

        def fetch_block(parts, targets, barrier, d, j):
            """Starts copying block (j, d), of 64 x 64, of the states or of their cotangents."""
            sources = [x.at[n, b, h, columns(j), columns(d)] for x in parts]
            tiles.fetch(zip(sources, targets), barrier)

        def fetch_states(i, d, j):
            """Starts copying a block of the states of recurrence i."""
            fetch_block(recurrences[i].states_parts, states_s, states_loaded[i], d, j)

        def fetch_dstates(i, d, j):
            """Starts copying a block of the cotangents of the states of recurrence i."""
            fetch_block(recurrences[i].dstates_parts, dstates_s, dstates_loaded[i], d, j)

        def fetch_following(fetch, i, d):
            """Fetches for the block after d: the next one of recurrence i, or the first one of recurrence i + 1."""
            last = d + 1 == recurrences[i].v_BTHV.shape[-1] // BLOCK
            pl.when(~last)(lambda: fetch(i, d + 1))
            if i + 1 < len(recurrences):
                pl.when(last)(lambda: fetch(i + 1, 0))

        every = zip((*q, k), (*q_s, k_s))
        tiles.fetch([(x.at[b, tokens, h, columns(j)], x_s[j]) for x, x_s in every for j in key_blocks], loaded)
        zero_s[0] = 0
        fetch_tokens(0, 0)
        fetch_states(0, 0, 0)
        fetch_dstates(0, 0, 0)
        leave_C = tiles.untiled(leave.at[n, b, h], tiles.ROWS.reduce(1))
        per_token = tiles.per_row(leave_C, BLOCK)

        plgpu.barrier_wait(loaded)
        q_of_block = list(zip(*q_s))
        factors = [pair for j in key_blocks for pair in tiles.cross_products(q_of_block[j], tiles.transposed([k_s[j]]))]
        scores = lambda: tiles.product((CHUNK, CHUNK), *factors)
        weighted_scores_s[...] = (scores() * tiles.untiled(intra.at[n, b, h])).astype(half)
        plgpu.commit_smem()

        def of_block(i, d, sums):
            """Adds what block d, 64 columns of the values of recurrence i, contributes to the sums, and stores its dv.

            The sums are those of (do . v [C, C], denter [C], dS v for each block of keys [C, D], <S, dS> for each row
            of the state, in blocks [D]).
            """
            dscores_CC, denter_C, written, carried = sums
            recurrence = recurrences[i]
            # The addresses are computed here from a 0 that is loaded from memory. Otherwise the compiler would compute
            # all of them before the loop and keep them in registers, of which there are not enough.
            q_s, k_s, weighted_scores_s, tokens_s, states_s, dstates_s = shared_blocks(zero_s[0])
            q_of_block = list(zip(*q_s))
            v_s, *do_s = tokens_s[: 1 + len(recurrence.do_parts)]
            states, dstates = states_s[: len(recurrence.states_parts)], dstates_s[: len(recurrence.dstates_parts)]
            read_CD, kept_CD, written, carried = None, None, list(written), list(carried)
            plgpu.barrier_wait(tokens_loaded[i])
            for j in key_blocks:

                def fetch_next(fetch, j=j):
                    """Calls `fetch` for the block that is needed after block j."""
                    if j + 1 < len(key_blocks):
                        fetch(i, d, j + 1)
                    else:
                        fetch_following(functools.partial(fetch, j=0), i, d)

                plgpu.barrier_wait(states_loaded[i])
                plgpu.barrier_wait(dstates_loaded[i])
                carried[j] += jnp.sum(tiles.sum_parts(states) * tiles.sum_parts(dstates), axis=1)
                read_CD = tiles.product((CHUNK, BLOCK), *tiles.cross_products(q_of_block[j], states), start=read_CD)
                # All warps have read the states: the next ones are fetched while the cotangents are used.
                plgpu.commit_smem()
                fetch_next(fetch_states)
                kept_CD, written[j] = tiles.products(
                    (BLOCK_SHAPE, kept_CD, tiles.cross_products([k_s[j]], dstates)),
                    (BLOCK_SHAPE, written[j], tiles.cross_products([v_s], tiles.transposed(dstates))),
                )
                plgpu.commit_smem()
                fetch_next(fetch_dstates)
            assert read_CD is not None and kept_CD is not None  # there is at least one block of keys
            denter_C += jnp.sum(tiles.sum_parts(do_s) * read_CD, axis=1)
            dscores_CC, dv_CD = tiles.products(
                ((CHUNK, CHUNK), dscores_CC, tiles.cross_products(do_s, tiles.transposed([v_s]))),
                (BLOCK_SHAPE, per_token * kept_CD, tiles.cross_products(tiles.transposed([weighted_scores_s]), do_s)),
            )
            plgpu.commit_smem()
            v_s[...] = dv_CD.astype(half)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_s, dv[i].at[b, tokens, h, columns(d)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_following(fetch_tokens, i, d)
            return dscores_CC, denter_C, tuple(written), tuple(carried)

        no_matrix = plgpu.layout_cast(jnp.zeros((CHUNK, BLOCK), jnp.float32), tiles.ROWS)
        no_rows = plgpu.layout_cast(jnp.zeros((CHUNK,), jnp.float32), tiles.ROWS.reduce(1))
        sums = no_matrix, no_rows, (no_matrix,) * len(key_blocks), (no_rows,) * len(key_blocks)
        # The blocks of a recurrence are a loop because unrolled they would not fit into the instruction cache.
        for i, recurrence in enumerate(recurrences):
            sums = lax.fori_loop(0, recurrence.v_BTHV.shape[-1] // BLOCK, functools.partial(of_block, i), sums)
        dscores_CC, denter_C, written, carried = sums

        # The scores are computed a second time because there are not enough registers to keep them.
        dintra[n, b, h, ...] = dscores_CC * scores()
        weighted_scores_s[...] = (dscores_CC * tiles.untiled(intra.at[n, b, h])).astype(half)
        dleave_C = sum(jnp.sum(tiles.tile(k_s[j]) * written[j], axis=1) for j in key_blocks)
        plgpu.commit_smem()
        for j in key_blocks:
            inside = tiles.cross_products(tiles.transposed([weighted_scores_s]), q_of_block[j])
            k_s[j][...] = tiles.product((CHUNK, BLOCK), *inside, start=per_token * written[j]).astype(half)
            dcarry[n, b, h, columns(j)] = carried[j]
        plgpu.commit_smem()
        for j in key_blocks:
            plgpu.copy_smem_to_gmem(k_s[j], dk.at[b, tokens, h, columns(j)])
        denter[n, b, h, ...], dleave[n, b, h, ...] = denter_C, dleave_C
        plgpu.wait_smem_to_gmem(0)

    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    most_do, most_states, most_dstates = (max(map(len, parts)) for parts in list(zip(*recurrences))[1:])
    counts_of_blocks = *[len(key_blocks)] * (len(q_parts) + 1), 1, 1 + most_do, most_states, most_dstates
    return RecurrenceGradientsGpu(
        *tiles.kernel(
            gradients_of_chunk,
            out_type=(
                tuple(like(recurrence.v_BTHV) for recurrence in recurrences),
                like(k_BTHK),
                like(intra_NBHCC),
                like(leave_NBHC),
                like(leave_NBHC),
                jax.ShapeDtypeStruct((count, batch, heads, size), jnp.float32),
            ),
            grid=(batch, count, heads),
            grid_names=("row", "chunk", "head"),
            # For Mesa this is 112 KiB, so that two chunks share an SM.
            scratch_types=[
                tiles.shared(sum(counts_of_blocks), CHUNK, BLOCK, dtype=half),
                plgpu.SMEM((1,), jnp.int32),
                plgpu.Barrier(num_arrivals=len(key_blocks) * (len(q_parts) + 1)),
                [plgpu.Barrier(num_arrivals=1 + len(x.do_parts)) for x in recurrences],
                [plgpu.Barrier(num_arrivals=len(x.states_parts)) for x in recurrences],
                [plgpu.Barrier(num_arrivals=len(x.dstates_parts)) for x in recurrences],
            ],
            compiler_params=tiles.COMPILER,
        )(q_parts, k_BTHK, intra_NBHCC, leave_NBHC, recurrences)
    )
