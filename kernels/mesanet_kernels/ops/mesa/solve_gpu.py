"""Mesa's solve on NVIDIA Hopper: all iterations of conjugate gradients in one kernel (docs/mesa.md, "The solver").

One warpgroup solves the systems of one chunk of one head. The keys of the chunk, its weights and the state that enters
it are loaded once and stay on the SM during all iterations. Products have float16 operands and float32 sums, which lose
nothing that matters: keys are exact in float16, and the state is a sum of two float16 matrices. The starting point and
all directions are rounded to float16 before both their uses, in the product and in the solution, so that the residual
stays that of the solution.

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
RESULTS = 2  # parts of a solution; where keys repeat, what it has in common with them is in its last bits
COMPILER = dataclasses.replace(tiles.COMPILER, reduction_scratch_bytes=16)  # one number per warp
# Numbers of padding after each row of a matrix in which every thread accesses elements of its own, without the matrix
# unit. The padding avoids bank conflicts.
PADDING = 8
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def solve_systems_gpu(
    rhs_parts, k_BTHK, parts_NBHKK, diagonal_NBHK, intra_NBHCC, enter_NBHC, lam_HK, *, max_iters, tol
):
    """Solves (H_t + Lambda) x_t = rhs_t for every token, like `solver.conjugate_gradients`.

    Args:
      rhs_parts: a tuple of bfloat16 arrays [B, T, H, K] with T = N C, whose sum is the right-hand sides; rows of any
        norm.
      k_BTHK: keys, bfloat16.
      parts_NBHKK: two float16 arrays, whose sum is the symmetric states that enter each chunk; blocks below the
        diagonal are not read.
      diagonal_NBHK: the diagonal of these states, float32.
      intra_NBHCC, enter_NBHC: the `ChunkWeights`, float32.
      lam_HK: float32.
      max_iters: the largest number of iterations.
      tol: the relative residual at which a token stops.

    Returns:
      (a tuple of two bfloat16 arrays [B, T, H, K], whose sum is x; iterations [N, B, H, C] int32).
    """
    count, batch, heads, _ = enter_NBHC.shape
    size, half = k_BTHK.shape[-1], k_BTHK.dtype
    blocks = range(size // BLOCK)
    upper = [(i, j) for i in blocks for j in blocks if i <= j]  # the blocks that determine a symmetric matrix

    def solve_chunk(rhs, k, high, low, diagonal, intra, enter, lam, x_out, iterations_out, *scratch):
        """Solves the systems of one chunk of one head."""
        keys_s, rows_s, state_or_result_s, intra_s, lam_s, loaded, state_loaded = scratch
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens, columns = pl.ds(n * CHUNK, CHUNK), [pl.ds(BLOCK * j, BLOCK) for j in blocks]
        # What is read first and what is computed last share memory, so that two chunks fit on one SM.
        raw_k_s, k_s = keys_s
        rhs_s, padded_x_s = rows_s
        x_s = [x.at[:, :BLOCK] for x in padded_x_s]
        state_s, result_s = state_or_result_s
        token_copies = [
            (x.at[b, tokens, h, columns[j]], y[j]) for x, y in zip([*rhs, k], [*rhs_s, raw_k_s]) for j in blocks
        ]
        tiles.fetch([*token_copies, (lam.at[h], lam_s)], loaded)
        state_copies = [
            (x.at[n, b, h, columns[i], columns[j]], y)
            for x, y_s in zip((high, low), state_s)
            for (i, j), y in zip(upper, y_s)
        ]
        tiles.fetch(state_copies, state_loaded)
        # Rounding a weight to float16 changes what its token contributes to H by at most a factor of 2^-11, and the
        # solutions by as little.
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
        plgpu.commit_smem()  # all warps have read the squares, whose memory the keys in float16 take
        tiles.store_parts(keys, k_s)
        plgpu.commit_smem()
        norm_C = _norm(_right_hand_side(rhs_s))
        inverse = tiles.per_row(1 / norm_C, BLOCK)

        def unit_rows():
            return [x * inverse for x in _right_hand_side(rhs_s)]

        root = [lax.rsqrt(d) for d in diagonals]  # one instruction; a division takes eight
        start = [x * r * r for x, r in zip(unit_rows(), root)]

        plgpu.barrier_wait(state_loaded)
        iterations_out[n, b, h, ...] = iterate(operator, unit_rows, start, x_s, max_iters=max_iters, tol=tol)
        norm = tiles.per_row(norm_C, BLOCK)
        plgpu.commit_smem()  # all warps have read the states, whose memory the results take
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
    """Returns the sum of parts, as a list of float32 blocks in registers; each part is a list of blocks in memory."""
    return [tiles.sum_parts(block) for block in zip(*parts_s)]


def _sum_of_rows(blocks):
    """Returns the sum of every row [C] of a matrix given as blocks of columns."""
    return sum(jnp.sum(x_CD, axis=1) for x_CD in blocks)


def _largest_of_rows(blocks):
    """Returns the largest magnitude in every row [C] of a matrix given as blocks of columns."""
    return functools.reduce(jnp.maximum, (jnp.max(jnp.abs(x_CD), axis=1) for x_CD in blocks))


def _norm(blocks):
    """Returns the norm of every row [C], or 1 for a zero row.

    Rows are first divided by their largest entry, because the squares of numbers like 1e-30 are 0 in float32.
    """
    largest_C = _largest_of_rows(blocks)
    largest_C = jnp.where(largest_C > SMALLEST, largest_C, 1.0)
    inverse = tiles.per_row(1 / largest_C, BLOCK)
    squares_C = _sum_of_rows([(x_CD * inverse) * (x_CD * inverse) for x_CD in blocks])
    return largest_C * jnp.sqrt(jnp.where(squares_C > 0, squares_C, 1.0))


class Operator(NamedTuple):
    """The matrices H_t + Lambda of a chunk, all of it in shared memory except for the decay of the entering state.

    Attributes:
      k_s: the keys, as blocks of columns [C, D].
      parts_s: the parts of the entering state, which is symmetric; each maps (i, j) with i <= j to a block [D, D].
      intra_s: the weights within the chunk [C, C].
      enter_C: the weight of the entering state for each token, in registers.
      lam_s: lambda [K].
    """

    k_s: list[tiles.Ref]
    parts_s: list[dict[tuple[int, int], tiles.Ref]]
    intra_s: tiles.Ref
    enter_C: jax.Array
    lam_s: tiles.Ref

    def lam(self, j):
        """Returns block j of lambda, repeated for each token, [C, D]."""
        return tiles.per_column(tiles.untiled(self.lam_s.at[pl.ds(BLOCK * j, BLOCK)], ROWS.reduce(0)), CHUNK)

    def image(self, p):
        """Returns H_t p_t as blocks of columns, float32 [C, D].

        Args:
          p: blocks of columns [C, D], whose rows have about unit norm, so that float16 can hold their products.
        """
        p = [p_CD.astype(HALF) for p_CD in p]
        entering = tiles.per_row(self.enter_C, BLOCK)
        scores = [(p_CD, k_s.transpose((1, 0))) for p_CD, k_s in zip(p, self.k_s)]
        of_state = [self._of_state(p, j) for j in range(len(p))]

        def multiply(overlaps, *images):
            # The first product with the state is started before waiting for the overlaps, to keep the matrix unit busy.
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
        """Returns the factors of block j of the product of p_t with the state that enters the chunk."""

        def block(part, i):
            return part[i, j] if i <= j else part[j, i].transpose((1, 0))

        return [(p_CD, block(part, i)) for part in self.parts_s for i, p_CD in enumerate(p)]


def iterate(operator: Operator, unit_rows, x, x_s, *, max_iters, tol):
    """Runs conjugate gradients on the systems of a chunk and leaves the solutions in x_s.

    Residuals and directions are kept in units of the norm of the residual. A direction is rounded to float16 before
    both its uses, in the product and in the solution. This turns the direction a little, and the residual stays that of
    the solution. There are not enough registers for float32 directions: spilled registers would travel to the L2 cache
    and back in every iteration, since shared memory leaves almost no L1 cache.

    Args:
      operator: the systems.
      unit_rows: a function that returns the right-hand sides of unit norm; called once, when they are needed.
      x: the starting point, which is rounded to float16 here.
      x_s: shared memory for the solutions, float32. Like the others, a list of blocks of columns [C, D].
      max_iters, tol: as in `solve_systems_gpu`.

    Returns:
      The number of iterations of each row, int32 [C].
    """
    blocks = range(len(x))
    per_row = lambda x_C: tiles.per_row(x_C, BLOCK)

    def image(p):
        """Returns (H_t + Lambda) p_t."""
        return [a + operator.lam(j) * p_CD.astype(jnp.float32) for j, a, p_CD in zip(blocks, operator.image(p), p)]

    scale_C = jnp.maximum(_largest_of_rows(x), ROUNDING**4)
    inverse, scale = per_row(1 / scale_C), per_row(scale_C)
    start = [tiles.leading_bits(x_CD * inverse, dropped=HALF_BITS) for x_CD in x]
    residual = [b - scale * a for b, a in zip(unit_rows(), image(start))]
    plgpu.commit_smem()  # all warps have read the right-hand sides, whose memory the solutions take
    tiles.store_parts([scale * x_CD for x_CD in start], x_s)
    delta_C = _sum_of_rows([r * r for r in residual])
    size_C, inverse = jnp.sqrt(delta_C), per_row(_inverse_root(delta_C))
    residual = [r * inverse for r in residual]
    stop_C = max(tol, ROUNDING) * size_C

    def advance(state):
        """Runs one iteration; the state is (its number, residual, direction, norm of the residual, iterations)."""
        iteration, residual, direction, size_C, iterations_C = state
        active_C = size_C > stop_C
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
        return iteration + 1, residual, direction, size_C * change_C, iterations_C + jnp.where(active_C, 1, 0)

    none_C = plgpu.layout_cast(jnp.zeros(size_C.shape, jnp.int32), ROWS.reduce(1))
    state = (jnp.int32(0), residual, [r.astype(HALF) for r in residual], size_C, none_C)

    def unfinished(state):
        iteration, _, _, size_C, _ = state
        return (iteration < max_iters) & (jnp.max(size_C - stop_C) > 0)

    *_, iterations_C = lax.while_loop(unfinished, advance, state)
    return iterations_C


def _inverse_root(x_C):
    """Returns 1 / sqrt(x), or 0 where x is 0, so that a residual that has vanished stays 0."""
    return jnp.where(x_C > 0, lax.rsqrt(jnp.where(x_C > 0, x_C, 1.0)), 0.0)
