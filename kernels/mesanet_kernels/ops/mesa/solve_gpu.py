"""Mesa's solve on NVIDIA Hopper with its inputs as the other kernels have them: one warpgroup a chunk.

The chunk's keys, mask and entering state are loaded once and stay on the SM while conjugate gradients run (mesanet.md
1.4, 1.5). Products are float16 with float32 sums, which keep what matters (mesanet.md 1.7.3): keys are exact, the state
is a sum of two float16 matrices, and the starting point and all directions are what float16 holds of them, so that the
residual is that of the solution.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, D columns of a block.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.ops.mesa.solver import ROUNDING, divide_positive
from mesanet_kernels.tiles import gpu as tiles
from mesanet_kernels.tiles.gpu import BLOCK, CHUNK, ROWS

HALF = jnp.float16
HALF_BITS = tiles.DROPPED[jnp.dtype(HALF)]
RESULTS = 2  # parts of a solution: where keys repeat, what they have in common with it is its last bits
COMPILER = dataclasses.replace(tiles.COMPILER, reduction_scratch_bytes=16)  # a number a warp
PADDING = 8  # numbers after each row of a matrix that only threads read, each its own: no two meet in a bank
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def solve_systems_gpu(
    rhs_parts, k_BTHK, parts_NBHKK, diagonal_NBHK, intra_NBHCC, enter_NBHC, lam_HK, *, max_iters, tol
):
    """(H_t + Lambda)^{-1} rhs_t of every token, T = N C.

    Args:
      rhs_parts: a tuple of bfloat16 arrays, whose sum is rhs; rows of any size. k_BTHK: bfloat16.
      parts_NBHKK: the states that enter each chunk, symmetric, the sum of two float16 arrays; diagonal_NBHK: theirs,
        float32.

    Returns:
      (x [B,T,H,K] as the sum of two bfloat16 arrays, iterations [N,B,H,C] int32).
    """
    count, batch, heads, _ = enter_NBHC.shape
    size, half = k_BTHK.shape[-1], k_BTHK.dtype
    blocks = range(size // BLOCK)
    upper = [(i, j) for i in blocks for j in blocks if i <= j]  # of a symmetric matrix

    def solve_chunk(rhs, k, high, low, diagonal, intra, enter, lam, x_out, iterations_out, *scratch):
        keys_s, rows_s, state_or_result_s, intra_s, lam_s, loaded, state_loaded = scratch
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens, columns = pl.ds(n * CHUNK, CHUNK), [pl.ds(BLOCK * j, BLOCK) for j in blocks]
        # What is read first and what is computed last share memory, so that two chunks fit on an SM.
        raw_k_s, k_s = keys_s
        rhs_s, padded_x_s = rows_s
        x_s = [x.at[:, :BLOCK] for x in padded_x_s]
        state_s, result_s = state_or_result_s
        rows = lambda refs, targets: [
            (x.at[b, tokens, h, columns[j]], y[j]) for x, y in zip(refs, targets) for j in blocks
        ]
        tiles.fetch([*rows([*rhs, k], [*rhs_s, raw_k_s]), (lam.at[h], lam_s)], loaded)
        block = lambda x, i, j: x.at[n, b, h, columns[i], columns[j]]
        tiles.fetch(
            [(block(x, *ij), y) for x, y_s in zip((high, low), state_s) for ij, y in zip(upper, y_s)], state_loaded
        )
        # To round a weight is to change what its token adds to H by 2^-11 of it at most, and solutions by as little.
        intra_CC = tiles.untiled(intra.at[n, b, h])
        intra_s[...] = intra_CC.astype(HALF)
        enter_C = tiles.untiled(enter.at[n, b, h], ROWS.reduce(1))
        before = [tiles.per_column(tiles.untiled(diagonal.at[n, b, h, c], ROWS.reduce(0)), CHUNK) for c in columns]

        plgpu.barrier_wait(loaded)
        keys = [tiles.tile(x) for x in raw_k_s]
        tiles.store_parts([x * x for x in keys], raw_k_s)
        plgpu.commit_smem()
        squares = [tiles.product((CHUNK, BLOCK), (intra_CC.astype(half), x)) for x in raw_k_s]
        operator = Operator(k_s, [dict(zip(upper, y_s)) for y_s in state_s], intra_s, enter_C, lam_s)
        entering = tiles.per_row(enter_C, BLOCK)
        diagonals = [a + entering * c + operator.lam(j) for a, c, j in zip(squares, before, blocks)]
        plgpu.commit_smem()  # all warps are past the squares
        tiles.store_parts(keys, k_s)
        plgpu.commit_smem()
        norm_C = _norm(_right_hand_side(rhs_s))
        inverse = tiles.per_row(1 / norm_C, BLOCK)
        unit = lambda: [x * inverse for x in _right_hand_side(rhs_s)]
        root = [lax.rsqrt(d) for d in diagonals]  # one instruction, a division takes eight
        start = [x * r * r for x, r in zip(unit(), root)]

        plgpu.barrier_wait(state_loaded)
        iterations_out[n, b, h, ...] = iterate(operator, unit, start, x_s, max_iters=max_iters, tol=tol)
        norm = tiles.per_row(norm_C, BLOCK)
        plgpu.commit_smem()  # all warps are past the states
        for j in blocks:
            parts = tiles.split_parts(tiles.untiled(x_s[j]) * norm, RESULTS, half)
            tiles.store_parts(parts, [part_s[j] for part_s in result_s])
        plgpu.commit_smem()
        for source, target in zip(result_s, x_out):
            for j in blocks:
                plgpu.copy_smem_to_gmem(source[j], target.at[b, tokens, h, columns[j]])
        plgpu.wait_smem_to_gmem(0)

    rows = lambda dtype: [tiles.shared(CHUNK, BLOCK, dtype=dtype) for _ in blocks]
    return tiles.kernel(
        solve_chunk,
        out_type=(
            (jax.ShapeDtypeStruct(k_BTHK.shape, half),) * RESULTS,
            jax.ShapeDtypeStruct(enter_NBHC.shape, jnp.int32),
        ),
        grid=(batch, count, heads),
        grid_names=("row", "chunk", "head"),
        scratch_types=[
            plgpu.RefUnion(rows(half), rows(HALF)),
            plgpu.RefUnion(
                [rows(half) for _ in rhs_parts], [plgpu.SMEM((CHUNK, BLOCK + PADDING), jnp.float32) for _ in blocks]
            ),
            plgpu.RefUnion(
                [[tiles.shared(BLOCK, BLOCK, dtype=HALF) for _ in upper] for _ in parts_NBHKK],
                [rows(half) for _ in range(RESULTS)],
            ),
            tiles.shared(CHUNK, CHUNK, dtype=HALF),
            plgpu.SMEM((size,), jnp.float32),
            plgpu.Barrier(num_arrivals=len(blocks) * (len(rhs_parts) + 1) + 1),
            plgpu.Barrier(num_arrivals=len(upper) * len(parts_NBHKK)),
        ],
        compiler_params=COMPILER,
    )(rhs_parts, k_BTHK, *parts_NBHKK, diagonal_NBHK, intra_NBHCC, enter_NBHC, lam_HK)


def _right_hand_side(parts_s):
    """The sum of parts, each a list of blocks in shared memory: a list of blocks in registers."""
    return [tiles.sum_parts(block) for block in zip(*parts_s)]


def _sum_of_rows(blocks):
    return sum(jnp.sum(x_CD, axis=1) for x_CD in blocks)


def _largest_of_rows(blocks):
    return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x_CD), axis=1) for x_CD in blocks))


def _norm(blocks):
    """Of every row; 1 of a zero row. By the largest entry first: squares of 1e-30 are 0."""
    largest_C = _largest_of_rows(blocks)
    largest_C = jnp.where(largest_C > SMALLEST, largest_C, 1.0)
    inverse = tiles.per_row(1 / largest_C, BLOCK)
    squares_C = _sum_of_rows([(x_CD * inverse) * (x_CD * inverse) for x_CD in blocks])
    return largest_C * jnp.sqrt(jnp.where(squares_C > 0, squares_C, 1.0))


class Operator(NamedTuple):
    """A chunk's H_t + Lambda, all of it in shared memory but for the decay of the entering state."""

    k_s: list
    parts_s: list[dict]  # of the entering state, which is symmetric: the blocks (i, j) with i <= j
    intra_s: object
    enter_C: jax.Array
    lam_s: object

    def lam(self, j):
        """Lambda's block j, [C, D]."""
        return tiles.per_column(tiles.untiled(self.lam_s.at[pl.ds(BLOCK * j, BLOCK)], ROWS.reduce(0)), CHUNK)

    def image(self, p):
        """H_t p_t, of rows of about unit size, which float16 then holds; blocks of columns to blocks of columns."""
        p = [p_CD.astype(HALF) for p_CD in p]
        entering = tiles.per_row(self.enter_C, BLOCK)
        scores = [(p_CD, k_s.transpose((1, 0))) for p_CD, k_s in zip(p, self.k_s)]
        of_state = [self._of_state(p, j) for j in range(len(p))]

        def multiply(overlaps, *images):
            # The matrix unit has work before the numbers that it is waiting for are taken from it.
            overlaps.add(*scores)
            images[0].add(*of_state[0])
            overlaps_CC = overlaps.value(running=len(of_state[0]))
            weighted_CC = overlaps_CC.astype(HALF) * plgpu.load(self.intra_s, layout=ROWS)
            for image, following, factors in zip(images, images[1:], of_state[1:]):
                following.add(*factors)
            for j, image in enumerate(images):
                started_later = (len(images) - 1 - j) * len(of_state[j]) + j
                image.restart(entering * image.value(running=started_later))
                image.add((weighted_CC, self.k_s[j]))
            return [image.value(running=len(images) - 1 - j) for j, image in enumerate(images)]

        return tiles.with_sums(multiply, (CHUNK, CHUNK), *[(CHUNK, BLOCK)] * len(p))

    def _of_state(self, p, j):
        """The factors of block j of p_t's image under the state that enters the chunk."""
        block = lambda part, i: part[i, j] if i <= j else part[j, i].transpose((1, 0))
        return [(p_CD, block(part, i)) for part in self.parts_s for i, p_CD in enumerate(p)]


def iterate(operator, unit, x, x_s, *, max_iters, tol):
    """Conjugate gradients on a chunk's rows, from x cut to float16; the solution is left in x_s, float32.

    Residuals and directions are kept in units of the residual's norm. A direction is float16, for its image and for the
    solution alike: rounding turns it a little, and the residual stays the solution's. In float32 registers could not
    hold it, and what they cannot hold goes to the L2 cache and back in every step, since shared memory leaves the L1
    none.
    unit: gives the right-hand sides, rows of unit size, when they are needed. All are lists of blocks of columns.
    Returns the steps of each row, int32 [C].
    """
    blocks = range(len(x))
    per_row = lambda x_C: tiles.per_row(x_C, BLOCK)

    def image(p):
        return [a + operator.lam(j) * p_CD.astype(jnp.float32) for j, a, p_CD in zip(blocks, operator.image(p), p)]

    scale_C = jnp.maximum(_largest_of_rows(x), ROUNDING**4)
    inverse, scale = per_row(1 / scale_C), per_row(scale_C)
    start = [tiles.leading_bits(x_CD * inverse, dropped=HALF_BITS) for x_CD in x]
    residual = [b - scale * a for b, a in zip(unit(), image(start))]
    plgpu.commit_smem()  # all warps are past the right-hand sides, whose memory x has
    tiles.store_parts([scale * x_CD for x_CD in start], x_s)
    delta_C = _sum_of_rows([r * r for r in residual])
    size_C, inverse = jnp.sqrt(delta_C), per_row(_inverse_root(delta_C))
    residual = [r * inverse for r in residual]
    rest_C = max(tol, ROUNDING) * size_C

    def advance(state):
        step, residual, direction, size_C, iterations_C = state
        active_C = size_C > rest_C
        images = image(direction)
        curvature_C = _sum_of_rows([p.astype(jnp.float32) * a for p, a in zip(direction, images)])
        length_C = divide_positive(1.0, curvature_C, active_C)
        length, moved = per_row(length_C), per_row(length_C * size_C)
        residual = [r - length * a for r, a in zip(residual, images)]
        delta_C = jnp.where(active_C, _sum_of_rows([r * r for r in residual]), 1.0)
        change_C = jnp.sqrt(delta_C)
        inverse, momentum = per_row(_inverse_root(delta_C)), per_row(jnp.where(active_C, change_C, 0.0))
        residual = [inverse * r for r in residual]
        direction = [p.astype(jnp.float32) for p in direction]
        for j, p in enumerate(direction):
            x_s[j][...] = tiles.untiled(x_s[j]) + moved * p
        direction = [(r + momentum * p).astype(HALF) for r, p in zip(residual, direction)]
        return step + 1, residual, direction, size_C * change_C, iterations_C + jnp.where(active_C, 1, 0)

    none_C = plgpu.layout_cast(jnp.zeros(size_C.shape, jnp.int32), ROWS.reduce(1))
    state = (jnp.int32(0), residual, [r.astype(HALF) for r in residual], size_C, none_C)
    unfinished = lambda state: (state[0] < max_iters) & (jnp.max(state[3] - rest_C) > 0)
    *_, iterations_C = lax.while_loop(unfinished, advance, state)
    return iterations_C


def _inverse_root(x_C):
    """0 of 0: what has vanished stays away."""
    return jnp.where(x_C > 0, lax.rsqrt(jnp.where(x_C > 0, x_C, 1.0)), 0.0)
