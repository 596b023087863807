"""Mesa's solve on TPUs: all iterations in one kernel, over H in VMEM (Pallas, Mosaic TPU).

Iterations are a chain of dependent products, so the heads of a step are interleaved to keep the matrix unit busy. What
they need stays in VMEM, the state that enters the chunk too, which is carried from chunk to chunk and never written.
The matrix unit multiplies bfloat16: keys are exact in it, all else is a sum of two parts, and products of two small
parts are left out (16 bits remain; mesanet.md 1.7.3). Where keys repeat, the starting point of the paper has a residual
many times as large as the right-hand side, whose rounding no later step would find: until two steps have made it small,
parts are three.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.ops.mesa.solver import ROUNDING, divide_positive, normalize
from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, EXACT, HALF

PARTS = 2  # of directions and of the state
EXACT_STEPS = 2


def solve_systems_tpu(rhs_BTHK, k_BTHK, weights, lam_HK, initial_BHKK, *, max_iters, tol):
    """(H_t + Lambda)^{-1} rhs_t of every token, T = N C, as `solver.conjugate_gradients`.

    Args:
      rhs_BTHK: bfloat16 or float32, rows of any size; k_BTHK: bfloat16.
      initial_BHKK: the state that enters the first chunk, float32, symmetric.

    Returns:
      (x [B,T,H,K] float32, the last state [B,H,K,K] float32, iterations [N,B,H,C] int32).
    """
    grid = tiles.grid(k_BTHK)
    size, every = k_BTHK.shape[-1], range(grid.group)

    def kernel(rhs, k, intra, enter, lam, initial, x_out, state, iterations_out, *scratch):
        k_s, state_s, x_s, residual_s, direction_s = scratch
        tiles.begin_state(state, initial)
        enter_GC1 = [tiles.column(enter[g]) for g in every]

        def image(g, p_CK, parts):
            """(H_t + Lambda) p_t."""
            k_CK = k_s[g]
            scores_CC = tiles.product(tiles.split_parts(p_CK, parts), [k_CK], b_transposed=True) * intra[g]
            inside_CK = tiles.product(tiles.split_parts(scores_CC, parts), [k_CK])
            entering_parts = tiles.split_parts(p_CK * enter_GC1[g], parts)
            before_CK = tiles.product(entering_parts, [part[g] for part in state_s[:parts]])
            return inside_CK + before_CK + lam[g] * p_CK

        norms, deltas = [], []
        for g in every:
            # A head's part of a block of all heads need not begin where a register does; its copy in scratch does.
            k_CK = k_s[g] = k[tiles.lanes(g, size)]
            for part, part_s in zip(tiles.split_parts(state[g], EXACT), state_s, strict=True):
                part_s[g] = part
            squares_CK = tiles.dot(intra[g].astype(HALF), k_CK * k_CK)
            diagonal_CK = squares_CK + enter_GC1[g] * tiles.diagonal(state[g]) + lam[g]
            unit_CK, norm_C1 = normalize(rhs[tiles.lanes(g, size)].astype(jnp.float32))
            x_s[g] = unit_CK / diagonal_CK
            residual_s[g] = direction_s[g] = unit_CK - image(g, x_s[g], EXACT)
            norms.append(norm_C1)
            deltas.append(_sum_of_rows(residual_s[g] * residual_s[g]))
        stops = [max(tol, ROUNDING) ** 2 * delta_C1 for delta_C1 in deltas]

        def advance(parts, carried):
            step, deltas, counts = carried
            next_deltas, next_counts = [], []
            for g, (delta_C1, stop_C1, count_C1) in enumerate(zip(deltas, stops, counts, strict=True)):
                active_C1 = delta_C1 > stop_C1
                direction_CK = direction_s[g]
                image_CK = image(g, direction_CK, parts)
                length_C1 = divide_positive(delta_C1, _sum_of_rows(direction_CK * image_CK), active_C1)
                x_s[g] += length_C1 * direction_CK
                residual_CK = residual_s[g] - length_C1 * image_CK
                next_C1 = jnp.where(active_C1, _sum_of_rows(residual_CK * residual_CK), delta_C1)
                residual_s[g] = residual_CK
                direction_s[g] = residual_CK + divide_positive(next_C1, delta_C1, active_C1) * direction_CK
                next_deltas.append(next_C1)
                next_counts.append(count_C1 + active_C1.astype(jnp.int32))
            return step + 1, next_deltas, next_counts

        def until(last, parts, carried):
            """Steps up to number `last`, fewer where all rows are done."""

            def unfinished(carried):
                step, deltas, _ = carried
                left = sum(jnp.max(delta_C1 - stop_C1) > 0 for delta_C1, stop_C1 in zip(deltas, stops, strict=True))
                return (step < last) & (left > 0)

            return lax.while_loop(unfinished, partial(advance, parts), carried)

        carried = jnp.int32(0), deltas, [jnp.zeros((CHUNK, 1), jnp.int32) for _ in every]
        carried = until(min(EXACT_STEPS, max_iters), EXACT, carried)
        *_, counts = until(max_iters, PARTS, carried)
        for g in every:
            x_out[tiles.lanes(g, size)] = x_s[g] * norms[g]
            iterations_out[g] = tiles.row(counts[g])
            leave_1C, carry_11 = intra[g, CHUNK - 1 :], enter[g, :, CHUNK - 1 :]
            state[g] = tiles.advance_state(state[g], k_s[g], k_s[g], leave_1C, carry_11, parts=EXACT)

    tokens, of_state = grid.tokens(size), grid.of_row(size, size)
    rows = lambda dtype, *shape: pltpu.VMEM((grid.group, *shape), dtype)
    enter_NBH1C = weights.enter_NBHC[..., None, :]
    x_BTW, final_BHKK, iterations_NBH1C = pl.pallas_call(
        kernel,
        grid=grid.steps,
        in_specs=[
            tokens,
            tokens,
            grid.of_chunk(CHUNK, CHUNK),
            grid.of_chunk(1, CHUNK),
            grid.of_heads(1, size),
            of_state,
        ],
        out_specs=[tokens, of_state, grid.of_chunk(1, CHUNK)],
        out_shape=[
            tiles.out(*tiles.flat(k_BTHK).shape),
            tiles.out(*initial_BHKK.shape),
            tiles.out(*enter_NBH1C.shape, dtype=jnp.int32),
        ],
        scratch_shapes=[
            rows(HALF, CHUNK, size),
            [rows(HALF, size, size)] * EXACT,
            *[rows(jnp.float32, CHUNK, size)] * 3,
        ],
        compiler_params=tiles.COMPILER,
    )(*map(tiles.flat, (rhs_BTHK, k_BTHK)), weights.intra_NBHCC, enter_NBH1C, lam_HK[:, None], initial_BHKK)
    return x_BTW.reshape(k_BTHK.shape), final_BHKK, iterations_NBH1C[..., 0, :]


def _sum_of_rows(x_CK):
    return jnp.sum(x_CK, axis=1, keepdims=True)
