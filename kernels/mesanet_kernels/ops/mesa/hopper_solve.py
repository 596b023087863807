"""Mesa's solve on NVIDIA Hopper with its inputs as the other kernels have them: one warpgroup a chunk.

The chunk's keys, mask and entering state are loaded once and stay on the SM while conjugate gradients run (mesanet.md
1.4, 1.5). Products are float16 with float32 sums, which keep what matters (mesanet.md 1.7.3): keys are exact, the state
is a sum of two float16 matrices, directions are rounded at unit size, and the first residual, which is large where
keys repeat, is computed from a starting point in two parts.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.gpu import tiles
from mesanet_kernels.gpu.tiles import CHUNK, ROWS
from mesanet_kernels.ops.mesa.fused import ROUNDING, divide

HALF = jnp.float16
HALF_BITS = tiles.DROPPED[jnp.dtype(HALF)]
RESULTS = 2  # parts of a solution: where keys repeat, what they have in common with it is its last bits
SMALLEST = float(jnp.finfo(jnp.float32).tiny)


def solve(rhs_parts, k_BTHK, parts_NBHKK, diagonal_NBHK, intra_NBHCC, enter_NBHC, lam_HK, *, max_iters, tol):
    """(H_t + Lambda)^{-1} rhs_t of every token, T = N C.

    Args:
      rhs_parts: a tuple of bfloat16 arrays, whose sum is rhs; rows of any size. k_BTHK: bfloat16.
      parts_NBHKK: the states that enter each chunk, the sum of two float16 arrays. diagonal_NBHK: theirs, float32.

    Returns:
      (x [B,T,H,K] as the sum of two bfloat16 arrays, iterations [N,B,H,C] int32).
    """
    count, batch, heads, _ = enter_NBHC.shape
    size, half = k_BTHK.shape[-1], k_BTHK.dtype

    def kernel(rhs, k, high, low, diagonal, intra, enter, lam, x_out, iterations_out, *scratch):
        keys_s, rows_s, high_or_result_s, low_s, loaded, matrix_loaded = scratch
        b, n, h = (lax.axis_index(name) for name in ("row", "chunk", "head"))
        tokens = pl.ds(n * CHUNK, CHUNK)
        # What is read first and what is computed last share memory, so that two chunks fit on an SM.
        raw_k_s, k_s = keys_s
        rhs_s, x_s = rows_s
        high_s, result_s = high_or_result_s
        tiles.fetch(zip([x.at[b, tokens, h] for x in (*rhs, k)], (*rhs_s, raw_k_s)), loaded)
        tiles.fetch([(high.at[n, b, h], high_s), (low.at[n, b, h], low_s)], matrix_loaded)
        intra_CC = tiles.untiled(intra.at[n, b, h])
        enter_C = tiles.untiled(enter.at[n, b, h], ROWS.reduce(1))
        column = lambda ref: lax.broadcast_in_dim(tiles.untiled(ref, ROWS.reduce(0)), (CHUNK, size), [1])
        lam_CK, before_CK = column(lam.at[h]), column(diagonal.at[n, b, h])

        plgpu.barrier_wait(loaded)
        k_CK = tiles.tile(raw_k_s)
        raw_k_s[...] = (k_CK * k_CK).astype(half)
        plgpu.commit_smem()
        inside_CK = tiles.product((CHUNK, size), (intra_CC.astype(half), raw_k_s))
        diagonal_CK = inside_CK + tiles.per_row(enter_C, size) * before_CK + lam_CK
        k_s[...] = k_CK.astype(HALF)
        plgpu.commit_smem()
        norm_C = _norm(tiles.total(rhs_s))
        unit = lambda: tiles.total(rhs_s) / tiles.per_row(norm_C, size)
        start_CK = unit() / diagonal_CK

        plgpu.barrier_wait(matrix_loaded)
        operator = Operator(k_s, high_s, low_s, intra_CC, enter_C, lam_CK)
        iterations_out[n, b, h, ...] = iterate(operator, unit, start_CK, x_s, max_iters=max_iters, tol=tol)
        x_CK = tiles.tile(x_s) * tiles.per_row(norm_C, size)
        tiles.store(tiles.cut(x_CK, RESULTS, half), result_s)
        plgpu.commit_smem()
        for source, target in zip(result_s, x_out):
            plgpu.copy_smem_to_gmem(source, target.at[b, tokens, h])
        plgpu.wait_smem_to_gmem(0)

    rows = lambda dtype: tiles.shared(CHUNK, size, dtype=dtype)
    return plgpu.kernel(
        kernel,
        out_type=(
            (jax.ShapeDtypeStruct(k_BTHK.shape, half),) * RESULTS,
            jax.ShapeDtypeStruct(enter_NBHC.shape, jnp.int32),
        ),
        grid=(batch, count, heads),
        grid_names=("row", "chunk", "head"),
        scratch_types=[
            plgpu.RefUnion(rows(half), rows(HALF)),
            plgpu.RefUnion([rows(half) for _ in rhs_parts], rows(jnp.float32)),
            plgpu.RefUnion(tiles.shared(size, size, dtype=HALF), [rows(half)] * RESULTS),
            tiles.shared(size, size, dtype=HALF),
            plgpu.Barrier(num_arrivals=len(rhs_parts) + 1),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=tiles.COMPILER,
    )(rhs_parts, k_BTHK, *parts_NBHKK, diagonal_NBHK, intra_NBHCC, enter_NBHC, lam_HK)


def _norm(x_CK):
    """Of every row; 1 of a zero row. By the largest entry first: squares of 1e-30 are 0."""
    largest_C = jnp.max(jnp.abs(x_CK), axis=1)
    largest_C = jnp.where(largest_C > SMALLEST, largest_C, 1.0)
    scaled_CK = x_CK / tiles.per_row(largest_C, x_CK.shape[1])
    squares_C = jnp.sum(scaled_CK * scaled_CK, axis=1)
    return largest_C * jnp.sqrt(jnp.where(squares_C > 0, squares_C, 1.0))


class Operator(NamedTuple):
    """A chunk's H_t + Lambda: keys and both parts of the entering state in shared memory, weights in registers."""

    k_s: object
    high_s: object
    low_s: object
    intra_CC: jax.Array
    enter_C: jax.Array
    lam_CK: jax.Array

    def image(self, p_CK):
        """H_t p_t, of rows of about unit size, which float16 then holds."""
        chunk, size = p_CK.shape
        overlaps_CC = tiles.product((chunk, chunk), (p_CK.astype(HALF), self.k_s.transpose((1, 0))))
        weighted_CC = (overlaps_CC * self.intra_CC).astype(HALF)
        entering_CK = (p_CK * tiles.per_row(self.enter_C, size)).astype(HALF)
        return tiles.product(
            (chunk, size), (weighted_CC, self.k_s), (entering_CK, self.high_s), (entering_CK, self.low_s)
        )


def iterate(operator, unit, x_CK, x_s, *, max_iters, tol):
    """Conjugate gradients on a chunk's rows, from x_CK; the solution is left in x_s, float32.

    unit: gives the right-hand sides [C, K], rows of unit size, when they are needed.
    Returns the steps of each row, int32 [C].
    """
    chunk, size = x_CK.shape
    sum_of_rows = lambda x_CK: jnp.sum(x_CK, axis=1)
    per_row = lambda x_C: tiles.per_row(x_C, size)

    # The residual of the starting point, whose rows are scaled to unit size and cut in two float16 parts.
    scale_CK = per_row(jnp.maximum(jnp.max(jnp.abs(x_CK), axis=1), ROUNDING**4))
    high_CK = tiles.leading_bits(x_CK / scale_CK, dropped=HALF_BITS)
    low_CK = (x_CK / scale_CK - high_CK) * 2.0**HALF_BITS
    image_CK = scale_CK * (operator.image(high_CK) + operator.image(low_CK) * 2.0**-HALF_BITS)
    residual_CK = unit() - image_CK - operator.lam_CK * x_CK
    x_s[...] = x_CK  # the least used of the iterates: registers hold the others
    delta_C = sum_of_rows(residual_CK * residual_CK)
    stop_C = max(tol, ROUNDING) ** 2 * delta_C

    def advance(state):
        step, residual_CK, direction_CK, delta_C, iterations_C = state
        active_C = delta_C > stop_C
        norm_CK = per_row(jnp.sqrt(jnp.where(active_C, delta_C, 1.0)))
        image_CK = norm_CK * operator.image(direction_CK / norm_CK) + operator.lam_CK * direction_CK
        curvature_C = sum_of_rows(direction_CK * image_CK)
        length_CK = per_row(divide(delta_C, curvature_C, active_C))
        x_s[...] = x_s[...] + length_CK * direction_CK
        residual_CK = residual_CK - length_CK * image_CK
        next_C = jnp.where(active_C, sum_of_rows(residual_CK * residual_CK), delta_C)
        direction_CK = residual_CK + per_row(divide(next_C, delta_C, active_C)) * direction_CK
        return step + 1, residual_CK, direction_CK, next_C, iterations_C + jnp.where(active_C, 1, 0)

    none_C = plgpu.layout_cast(jnp.zeros((chunk,), jnp.int32), ROWS.reduce(1))
    state = (jnp.int32(0), residual_CK, residual_CK, delta_C, none_C)
    unfinished = lambda state: (state[0] < max_iters) & (jnp.max(state[3] - stop_C) > 0)
    *_, iterations_C = lax.while_loop(unfinished, advance, state)
    return iterations_C
