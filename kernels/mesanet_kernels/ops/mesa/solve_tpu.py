"""Mesa's solve on TPUs: all iterations of conjugate gradients in one kernel (docs/mesa.md, "The solver").

Iterations are a chain of dependent products, so the heads of a grid step are interleaved to keep the matrix unit busy.
Everything that they need stays in VMEM, including the state that enters the chunk, which is carried from chunk to chunk
and never written to memory.

The matrix unit multiplies bfloat16. Keys are exact in it; everything else is a sum of two parts, and the products of
two small parts are left out, so that 16 bits remain. The first iterations use three parts: where keys repeat, the
residual of the starting point is many times as large as the right-hand side, and no later iteration would find its
rounding error.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, G heads of a grid step.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.ops.mesa.solver import ROUNDING, divide_positive, normalize
from mesanet_kernels.tiles import tpu as tiles
from mesanet_kernels.tiles.tpu import CHUNK, EXACT, HALF

PARTS = 2  # bfloat16 parts of directions and of the state
EXACT_ITERATIONS = 2  # how many iterations use tiles.EXACT parts


def solve_systems_tpu(
    rhs_BTHK: jax.Array,
    k_BTHK: jax.Array,
    weights: ChunkWeights,
    lam_HK: jax.Array,
    initial_BHKK: jax.Array,
    *,
    max_iters: int,
    tol: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Solves (H_t + Lambda) x_t = rhs_t for every token, like `solver.conjugate_gradients`.

    Args:
      rhs_BTHK: right-hand sides, bfloat16 or float32, rows of any norm; T = N C.
      k_BTHK: keys, bfloat16.
      weights: float32.
      lam_HK: float32.
      initial_BHKK: the state H that enters the first chunk, float32, symmetric.
      max_iters: the largest number of iterations.
      tol: the relative residual at which a token stops.

    Returns:
      (x [B, T, H, K] float32, H after the last token [B, H, K, K] float32, iterations [N, B, H, C] int32).
    """
    grid = tiles.grid(k_BTHK)
    size, every = k_BTHK.shape[-1], range(grid.group)

    def kernel(rhs, k, intra, enter, lam, initial, x_out, state, iterations_out, *scratch):
        """Solves the systems of one chunk of a group of heads; `state` stays in VMEM from one chunk to the next."""
        k_s, state_s, x_s, residual_s, direction_s = scratch
        tiles.begin_state(state, initial)
        enter_GC1 = [tiles.column(enter[g]) for g in every]

        def image(g, p_CK, parts):
            """Returns (H_t + Lambda) p_t of head g, multiplied in `parts` parts."""
            k_CK = k_s[g]
            scores_CC = tiles.product(tiles.split_parts(p_CK, parts), [k_CK], b_transposed=True) * intra[g]
            inside_CK = tiles.product(tiles.split_parts(scores_CC, parts), [k_CK])
            entering_parts = tiles.split_parts(p_CK * enter_GC1[g], parts)
            before_CK = tiles.product(entering_parts, [part[g] for part in state_s[:parts]])
            return inside_CK + before_CK + lam[g] * p_CK

        norms, deltas = [], []
        for g in every:
            # Within a block of all heads, the keys of a head may begin in the middle of a register; a copy does not.
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
            """Runs one iteration for every head; carries (its number, squared residuals, iterations of each row)."""
            iteration, deltas, counts = carried
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
            return iteration + 1, next_deltas, next_counts

        def until(last, parts, carried):
            """Iterates up to iteration `last`, or until all rows are done."""

            def unfinished(carried):
                iteration, deltas, _ = carried
                left = sum(jnp.max(delta_C1 - stop_C1) > 0 for delta_C1, stop_C1 in zip(deltas, stops, strict=True))
                return (iteration < last) & (left > 0)

            return lax.while_loop(unfinished, partial(advance, parts), carried)

        carried = jnp.int32(0), deltas, [jnp.zeros((CHUNK, 1), jnp.int32) for _ in every]
        carried = until(min(EXACT_ITERATIONS, max_iters), EXACT, carried)
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
    """Returns [C, 1]."""
    return jnp.sum(x_CK, axis=1, keepdims=True)
