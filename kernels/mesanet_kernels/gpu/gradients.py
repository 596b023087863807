"""Gradients of a linear recurrence with a scalar decay and of its readout, on NVIDIA Hopper: one warpgroup a chunk.

    o_t = enter_t S^T q_t + sum_s intra_ts (q_t . k_s) v_s          S' = carry S + sum_s leave_s k_s v_s^T

S enters the chunk and S' leaves it. Given the cotangents do of o and dS of S',

    dv_s = sum_t intra_ts (q_t . k_s) do_t + leave_s dS^T k_s       dk_s = sum_t intra_ts (do_t . v_s) q_t + leave_s dS v_s
    dintra_ts = (do_t . v_s) (q_t . k_s)    denter_t = do_t . S^T q_t    dleave_s = k_s . dS v_s    dcarry = <S, dS>

dq is a readout (readout.py). One set of keys may carry several memories: all but dv sum over them.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, D columns of a block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.gpu import tiles
from mesanet_kernels.gpu.tiles import BLOCK, CHUNK


class Memory(NamedTuple):
    """What was written and read at the same keys and queries, bfloat16; all but v are sums of parts."""

    v_BTHV: jax.Array
    do_parts: tuple[jax.Array, ...]
    states_parts: tuple[jax.Array, ...]  # [N,B,H,K,V], entering each chunk
    dstates_parts: tuple[jax.Array, ...]  # cotangents of those leaving it


class Gradients(NamedTuple):
    """Of keys and values bfloat16, of weights float32."""

    dv_BTHV: tuple[jax.Array, ...]  # one a memory
    dk_BTHK: jax.Array
    dintra_NBHCC: jax.Array
    denter_NBHC: jax.Array
    dleave_NBHC: jax.Array
    dcarry_NBHK: jax.Array  # to be summed over K


def gradients(q_parts, k_BTHK, intra_NBHCC, leave_NBHC, memories):
    """The `Gradients` of keys, values and weights: inputs bfloat16, T = N C; weights float32; `memories` a tuple."""
    count, batch, heads, _ = leave_NBHC.shape
    size, half = k_BTHK.shape[-1], k_BTHK.dtype

    def kernel(q, k, intra, leave, memories, dv, dk, dintra, denter, dleave, dcarry, *scratch):
        q_s, k_s, intra_s, leave_s, inner_s, block_s, loaded, block_loaded = scratch
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens = pl.ds(n * CHUNK, CHUNK)
        whole = [x.at[b, tokens, h] for x in (*q, k)] + [intra.at[n, b, h], leave.at[n, b, h]]
        tiles.fetch(zip(whole, (*q_s, k_s, intra_s, leave_s)), loaded)
        blocks = [(i, pl.ds(d, BLOCK)) for i, x in enumerate(dv) for d in range(0, x.shape[-1], BLOCK)]
        # A memory of fewer parts than another leaves the rest of the block's memory alone.
        block_of = [
            Memory(block_s.v_BTHV, *(targets[: len(parts)] for targets, parts in zip(block_s[1:], memory[1:])))
            for memory in memories
        ]

        def fetch_block(i, columns):
            v, do, states, dstates = memories[i]
            of_tokens = [x.at[b, tokens, h, columns] for x in (v, *do)]
            of_chunk = [x.at[n, b, h, :, columns] for x in (*states, *dstates)]
            tiles.fetch(zip(of_tokens + of_chunk, _flat(block_of[i])), block_loaded[i])

        fetch_block(*blocks[0])
        plgpu.barrier_wait(loaded)
        leave_C = tiles.untiled(leave_s, tiles.ROWS.reduce(1))
        scores = lambda: tiles.product((CHUNK, CHUNK), *tiles.crossed(q_s, tiles.transposed([k_s])))
        inner_s[...] = (scores() * tiles.tile(intra_s)).astype(half)
        plgpu.commit_smem()
        sums = ()
        for (i, columns), following in zip(blocks, [*blocks[1:], None]):
            plgpu.barrier_wait(block_loaded[i])
            of_block, dv_CD = _of_block(q_s, k_s, inner_s, leave_C, block_of[i])
            sums = tuple(a + b for a, b in zip(sums, of_block)) or of_block
            block_s.v_BTHV[...] = dv_CD.astype(half)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(block_s.v_BTHV, dv[i].at[b, tokens, h, columns])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if following:
                fetch_block(*following)

        dinner_CC, written_CK, denter_C, dcarry_K = sums
        inner_s[...] = (dinner_CC * tiles.tile(intra_s)).astype(half)
        # The scores again: to keep them would take more registers than there are.
        intra_s[...] = dinner_CC * scores()
        dleave_C = jnp.sum(tiles.tile(k_s) * written_CK, axis=1)
        plgpu.commit_smem()
        inside_CK = tiles.product((CHUNK, size), *tiles.crossed(tiles.transposed([inner_s]), q_s))
        k_s[...] = (inside_CK + tiles.per_row(leave_C, size) * written_CK).astype(half)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(k_s, dk.at[b, tokens, h])
        plgpu.copy_smem_to_gmem(intra_s, dintra.at[n, b, h])
        for target, value in ((denter, denter_C), (dleave, dleave_C), (dcarry, dcarry_K)):
            target[n, b, h, ...] = value
        plgpu.wait_smem_to_gmem(0)

    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    of_block = lambda rows: tiles.shared(rows, BLOCK, dtype=half)
    most_parts = [max(map(len, parts)) for parts in list(zip(*memories))[1:]]
    return Gradients(
        *plgpu.kernel(
            kernel,
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
            scratch_types=[
                [tiles.shared(CHUNK, size, dtype=half) for _ in q_parts],
                tiles.shared(CHUNK, size, dtype=half),
                tiles.shared(CHUNK, CHUNK, dtype=jnp.float32),
                plgpu.SMEM((CHUNK,), jnp.float32),
                tiles.shared(CHUNK, CHUNK, dtype=half),
                Memory(
                    of_block(CHUNK), *([of_block(rows)] * most for rows, most in zip((CHUNK, size, size), most_parts))
                ),
                plgpu.Barrier(num_arrivals=len(q_parts) + 3),
                [plgpu.Barrier(num_arrivals=len(jax.tree.leaves(memory))) for memory in memories],
            ],
            compiler_params=tiles.COMPILER,
        )(q_parts, k_BTHK, intra_NBHCC, leave_NBHC, memories)
    )


def _of_block(q_s, k_s, inner_s, leave_C, block):
    """What 64 columns of a memory add to the sums over all columns, and dv of these columns."""
    v_s, do_s, state_s, dstate_s = block
    size = k_s.shape[1]
    read_CD = tiles.product((CHUNK, BLOCK), *tiles.crossed(q_s, state_s))
    sums = (
        tiles.product((CHUNK, CHUNK), *tiles.crossed(do_s, tiles.transposed([v_s]))),
        tiles.product((CHUNK, size), *tiles.crossed([v_s], tiles.transposed(dstate_s))),
        jnp.sum(tiles.total(do_s) * read_CD, axis=1),
        jnp.sum(tiles.total(state_s) * tiles.total(dstate_s), axis=1),
    )
    written_CD = tiles.product((CHUNK, BLOCK), *tiles.crossed([k_s], dstate_s))
    inside_CD = tiles.product((CHUNK, BLOCK), *tiles.crossed(tiles.transposed([inner_s]), do_s))
    return sums, inside_CD + tiles.per_row(leave_C, BLOCK) * written_CD


def _flat(memory):
    v, *parts = memory
    return [v, *(x for of_one in parts for x in of_one)]
