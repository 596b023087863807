"""Gradients of a linear recurrence with a scalar decay and of its readout, on NVIDIA Hopper: one warpgroup a chunk.

    o_t = enter_t S^T q_t + sum_s intra_ts (q_t . k_s) v_s          S' = carry S + sum_s leave_s k_s v_s^T

S enters the chunk and S' leaves it. Given the cotangents do of o and dS of S',

    dv_s = sum_t intra_ts (q_t . k_s) do_t + leave_s dS^T k_s       dk_s = sum_t intra_ts (do_t . v_s) q_t + leave_s dS v_s
    dintra_ts = (do_t . v_s) (q_t . k_s)    denter_t = do_t . S^T q_t    dleave_s = k_s . dS v_s    dcarry = <S, dS>

dq is a readout (readout.py). One set of keys may carry several memories: all but dv sum over them.

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

from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import BLOCK, CHUNK

BLOCKS = CHUNK, BLOCK  # of what a token has


class RecurrenceInputsGpu(NamedTuple):
    """What was written and read at the same keys and queries, bfloat16; all but v are sums of parts."""

    v_BTHV: jax.Array
    do_parts: tuple[jax.Array, ...]
    states_parts: tuple[jax.Array, ...]  # [N,B,H,K,V], entering each chunk
    dstates_parts: tuple[jax.Array, ...]  # cotangents of those leaving it


class RecurrenceGradientsGpu(NamedTuple):
    """Of keys and values bfloat16, of weights float32."""

    dv_BTHV: tuple[jax.Array, ...]  # one a memory
    dk_BTHK: jax.Array
    dintra_NBHCC: jax.Array
    denter_NBHC: jax.Array
    dleave_NBHC: jax.Array
    dcarry_NBHK: jax.Array  # to be summed over K


def gradients_gpu(q_parts, k_BTHK, intra_NBHCC, leave_NBHC, memories):
    """The `RecurrenceGradientsGpu` of keys, values and weights: inputs bfloat16, T = N C; weights float32; `memories` a tuple."""
    count, batch, heads, _ = leave_NBHC.shape
    size, half = k_BTHK.shape[-1], k_BTHK.dtype
    key_blocks = range(size // BLOCK)

    def gradients_of_chunk(q, k, intra, leave, memories, dv, dk, dintra, denter, dleave, dcarry, *scratch):
        blocks_s, nothing_s, loaded, tokens_loaded, states_loaded, dstates_loaded = scratch
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens, columns = pl.ds(n * CHUNK, CHUNK), lambda j: pl.ds(BLOCK * j, BLOCK)

        def shared_blocks(nothing):
            """(queries, keys, weighted scores, tokens of a memory, states, their cotangents), `nothing` being 0."""
            numbers = itertools.count()
            lists = [[blocks_s.at[next(numbers) + nothing] for _ in range(count)] for count in counts_of_blocks]
            *q_s, k_s, (inner_s,), tokens_s, states_s, dstates_s = lists
            return q_s, k_s, inner_s, tokens_s, states_s, dstates_s

        q_s, k_s, inner_s, tokens_s, states_s, dstates_s = shared_blocks(0)

        def fetch_tokens(i, d):
            parts = zip((memories[i].v_BTHV, *memories[i].do_parts), tokens_s)
            tiles.fetch([(x.at[b, tokens, h, columns(d)], x_s) for x, x_s in parts], tokens_loaded[i])

        def fetch_block(parts, targets, barrier, d, j):
            """A block of 64 x 64 of states or of their cotangents."""
            sources = [x.at[n, b, h, columns(j), columns(d)] for x in parts]
            tiles.fetch(zip(sources, targets), barrier)

        def fetch_states(i, d, j):
            fetch_block(memories[i].states_parts, states_s, states_loaded[i], d, j)

        def fetch_dstates(i, d, j):
            fetch_block(memories[i].dstates_parts, dstates_s, dstates_loaded[i], d, j)

        def fetch_following(fetch, i, d):
            """For the block after d: of this memory, or the first of the next."""
            last = d + 1 == memories[i].v_BTHV.shape[-1] // BLOCK
            pl.when(~last)(lambda: fetch(i, d + 1))
            if i + 1 < len(memories):
                pl.when(last)(lambda: fetch(i + 1, 0))

        every = zip((*q, k), (*q_s, k_s))
        tiles.fetch([(x.at[b, tokens, h, columns(j)], x_s[j]) for x, x_s in every for j in key_blocks], loaded)
        nothing_s[0] = 0
        fetch_tokens(0, 0)
        fetch_states(0, 0, 0)
        fetch_dstates(0, 0, 0)
        leave_C = tiles.untiled(leave.at[n, b, h], tiles.ROWS.reduce(1))
        per_token = tiles.per_row(leave_C, BLOCK)

        plgpu.barrier_wait(loaded)
        q_of_block = list(zip(*q_s))
        factors = [pair for j in key_blocks for pair in tiles.cross_products(q_of_block[j], tiles.transposed([k_s[j]]))]
        scores = lambda: tiles.product((CHUNK, CHUNK), *factors)
        inner_s[...] = (scores() * tiles.untiled(intra.at[n, b, h])).astype(half)
        plgpu.commit_smem()

        def of_block(i, d, sums):
            """Adds to the sums what 64 columns of memory i have to add, and stores dv of these columns."""
            dinner_CC, denter_C, written, carried = sums
            memory = memories[i]
            # The compiler would else keep the addresses of all blocks from before the loop, in registers it does not have.
            q_s, k_s, inner_s, tokens_s, states_s, dstates_s = shared_blocks(nothing_s[0])
            q_of_block = list(zip(*q_s))
            v_s, *do_s = tokens_s[: 1 + len(memory.do_parts)]
            states, dstates = states_s[: len(memory.states_parts)], dstates_s[: len(memory.dstates_parts)]
            read_CD, kept_CD, written, carried = None, None, list(written), list(carried)
            plgpu.barrier_wait(tokens_loaded[i])
            for j in key_blocks:
                following = lambda fetch, j=j: (
                    fetch(i, d, j + 1)
                    if j + 1 < len(key_blocks)
                    else fetch_following(functools.partial(fetch, j=0), i, d)
                )
                plgpu.barrier_wait(states_loaded[i])
                plgpu.barrier_wait(dstates_loaded[i])
                carried[j] += jnp.sum(tiles.sum_parts(states) * tiles.sum_parts(dstates), axis=1)
                read_CD = tiles.product((CHUNK, BLOCK), *tiles.cross_products(q_of_block[j], states), start=read_CD)
                plgpu.commit_smem()  # all warps are past the states: the next ones come while the cotangents are used
                following(fetch_states)
                kept_CD, written[j] = tiles.products(
                    (BLOCKS, kept_CD, tiles.cross_products([k_s[j]], dstates)),
                    (BLOCKS, written[j], tiles.cross_products([v_s], tiles.transposed(dstates))),
                )
                plgpu.commit_smem()
                following(fetch_dstates)
            denter_C += jnp.sum(tiles.sum_parts(do_s) * read_CD, axis=1)
            dinner_CC, dv_CD = tiles.products(
                ((CHUNK, CHUNK), dinner_CC, tiles.cross_products(do_s, tiles.transposed([v_s]))),
                (BLOCKS, per_token * kept_CD, tiles.cross_products(tiles.transposed([inner_s]), do_s)),
            )
            plgpu.commit_smem()
            v_s[...] = dv_CD.astype(half)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(v_s, dv[i].at[b, tokens, h, columns(d)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch_following(fetch_tokens, i, d)
            return dinner_CC, denter_C, tuple(written), tuple(carried)

        nothing = lambda shape, layout: plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
        matrix, of_rows = nothing((CHUNK, BLOCK), tiles.ROWS), nothing((CHUNK,), tiles.ROWS.reduce(1))
        sums = matrix, of_rows, (matrix,) * len(key_blocks), (of_rows,) * len(key_blocks)
        # The blocks in a loop: all of them in a row are more instructions than their cache holds.
        for i, memory in enumerate(memories):
            sums = lax.fori_loop(0, memory.v_BTHV.shape[-1] // BLOCK, functools.partial(of_block, i), sums)
        dinner_CC, denter_C, written, carried = sums

        # The scores again: to keep them would take more registers than there are.
        dintra[n, b, h, ...] = dinner_CC * scores()
        inner_s[...] = (dinner_CC * tiles.untiled(intra.at[n, b, h])).astype(half)
        dleave_C = sum(jnp.sum(tiles.tile(k_s[j]) * written[j], axis=1) for j in key_blocks)
        plgpu.commit_smem()
        for j in key_blocks:
            inside = tiles.cross_products(tiles.transposed([inner_s]), q_of_block[j])
            k_s[j][...] = tiles.product((CHUNK, BLOCK), *inside, start=per_token * written[j]).astype(half)
            dcarry[n, b, h, columns(j)] = carried[j]
        plgpu.commit_smem()
        for j in key_blocks:
            plgpu.copy_smem_to_gmem(k_s[j], dk.at[b, tokens, h, columns(j)])
        denter[n, b, h, ...], dleave[n, b, h, ...] = denter_C, dleave_C
        plgpu.wait_smem_to_gmem(0)

    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    most_do, most_states, most_dstates = (max(map(len, parts)) for parts in list(zip(*memories))[1:])
    counts_of_blocks = *[len(key_blocks)] * (len(q_parts) + 1), 1, 1 + most_do, most_states, most_dstates
    return RecurrenceGradientsGpu(
        *tiles.kernel(
            gradients_of_chunk,
            out_type=(
                tuple(like(memory.v_BTHV) for memory in memories),
                like(k_BTHK),
                like(intra_NBHCC),
                like(leave_NBHC),
                like(leave_NBHC),
                jax.ShapeDtypeStruct((count, batch, heads, size), jnp.float32),
            ),
            grid=(batch, count, heads),
            grid_names=("row", "chunk", "head"),
            # Of mesa's memories 112 KiB: two chunks on an SM.
            scratch_types=[
                tiles.shared(sum(counts_of_blocks), CHUNK, BLOCK, dtype=half),
                plgpu.SMEM((1,), jnp.int32),
                plgpu.Barrier(num_arrivals=len(key_blocks) * (len(q_parts) + 1)),
                [plgpu.Barrier(num_arrivals=1 + len(memory.do_parts)) for memory in memories],
                [plgpu.Barrier(num_arrivals=len(memory.states_parts)) for memory in memories],
                [plgpu.Barrier(num_arrivals=len(memory.dstates_parts)) for memory in memories],
            ],
            compiler_params=tiles.COMPILER,
        )(q_parts, k_BTHK, intra_NBHCC, leave_NBHC, memories)
    )
