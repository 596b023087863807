"""Mesa on TPUs: kernels for the weights (tpu/weights.py) and for the solve; states and readouts are XLA's (chunked.py).

The solve is one kernel for all iterations, a few heads of a chunk at a time (Pallas, Mosaic TPU).
Iterations are a chain of dependent products, so the heads of a step are interleaved to keep the matrix unit busy. What
they need stays in VMEM. The matrix unit multiplies bfloat16: keys are exact in it, all else is a sum of two parts, and
products of two small parts are left out (16 bits remain; mesanet.md 1.7.3).

R chunks of all rows and heads (N*B*H), G of them in a step, C tokens of a chunk, H heads, K key size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels.checks import require
from mesanet_kernels.chunks import ChunkWeights
from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa import fused
from mesanet_kernels.ops.mesa.fused import ROUNDING, divide
from mesanet_kernels.partition import partitioned
from mesanet_kernels.tpu import tiles
from mesanet_kernels.tpu.weights import chunk_weights

CHUNK = tiles.CHUNK
KEY_SIZES = (64, 128)
HALF = tiles.HALF
HEADS = (4, 2, 1)  # of a step: the most that divide the heads


def mesa(options, q_BTHK, k_BTHK, *rest):
    """As `api.mesa`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("mesa", "pallas_tpu", lacks(options, q_BTHK, k_BTHK))
    return chunked_lib.mesa(BACKEND, options._replace(chunk=CHUNK), q_BTHK, k_BTHK, *rest)


def lacks(options, q_BTHK, k_BTHK, *_):
    """What the call needs and the kernel has not, as the end of a sentence; "" where it can do it."""
    reasons = {
        f"has no solver {options.solver!r}": options.solver != "cg",
        "needs q and k in bfloat16": q_BTHK.dtype != HALF or k_BTHK.dtype != HALF,
        f"needs a key size in {KEY_SIZES}": k_BTHK.shape[-1] not in KEY_SIZES,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _kernel(
    unit_RCK, start_RCK, k_RCK, high_RKK, low_RKK, intra_RCC, enter_RC, lam_HK, *, max_iters, tol, interpret=False
):
    """The kernel, as `fused` calls it; `interpret` as in `pl.pallas_call`."""
    systems, chunk, size = unit_RCK.shape
    heads = lam_HK.shape[0]
    group = next(count for count in HEADS if heads % count == 0)

    def kernel(unit, start, k, high, low, intra, enter, lam, x_out, iterations_out, residual, direction):
        every = range(group)
        enter_GC1 = [tiles.column(enter[g]) for g in every]

        def image(g, p_CK):
            """H_t p_t."""
            weighted_CC = _times(p_CK, k[g], transposed=True) * intra[g]
            entering_high, entering_low = _in_two_parts(p_CK * enter_GC1[g])
            inside_CK = _times(weighted_CC, k[g])
            parts = (entering_high, high), (entering_low, high), (entering_high, low)
            return inside_CK + sum(tiles.dot(part_CK, state[g]) for part_CK, state in parts)

        deltas = []
        for g in every:
            x_CK = start[g]
            residual_CK = unit[g] - image(g, x_CK) - lam[g] * x_CK
            x_out[g] = x_CK
            residual[g], direction[g] = residual_CK, residual_CK
            deltas.append(_sum_of_rows(residual_CK * residual_CK))
        stops = [max(tol, ROUNDING) ** 2 * delta_C1 for delta_C1 in deltas]

        def unfinished(state):
            step, deltas, _ = state
            left = sum(jnp.max(delta_C1 - stop_C1) > 0 for delta_C1, stop_C1 in zip(deltas, stops, strict=True))
            return (step < max_iters) & (left > 0)

        def advance(state):
            step, deltas, counts = state
            next_deltas, next_counts = [], []
            for g, (delta_C1, stop_C1, count_C1) in enumerate(zip(deltas, stops, counts, strict=True)):
                active_C1 = delta_C1 > stop_C1
                direction_CK = direction[g]
                image_CK = image(g, direction_CK) + lam[g] * direction_CK
                curvature_C1 = _sum_of_rows(direction_CK * image_CK)
                length_C1 = divide(delta_C1, curvature_C1, active_C1)
                x_out[g] += length_C1 * direction_CK
                residual_CK = residual[g] - length_C1 * image_CK
                next_C1 = jnp.where(active_C1, _sum_of_rows(residual_CK * residual_CK), delta_C1)
                residual[g] = residual_CK
                direction[g] = residual_CK + divide(next_C1, delta_C1, active_C1) * direction_CK
                next_deltas.append(next_C1)
                next_counts.append(count_C1 + active_C1.astype(jnp.int32))
            return step + 1, next_deltas, next_counts

        none = [jnp.zeros((chunk, 1), jnp.int32) for _ in every]
        *_, counts = lax.while_loop(unfinished, advance, (jnp.int32(0), deltas, none))
        for g in every:
            iterations_out[g] = tiles.row(counts[g])

    of_step = lambda *shape: pl.BlockSpec((group, *shape), lambda step: (step, 0, 0))
    of_heads = pl.BlockSpec((group, 1, size), lambda step: (step % (heads // group), 0, 0))
    x_RCK, iterations_R1C = pl.pallas_call(
        kernel,
        grid=(systems // group,),
        in_specs=[
            of_step(chunk, size),
            of_step(chunk, size),
            of_step(chunk, size),
            of_step(size, size),
            of_step(size, size),
            of_step(chunk, chunk),
            of_step(1, chunk),
            of_heads,
        ],
        out_specs=[of_step(chunk, size), of_step(1, chunk)],
        out_shape=[
            jax.ShapeDtypeStruct(unit_RCK.shape, jnp.float32),
            jax.ShapeDtypeStruct((systems, 1, chunk), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((group, chunk, size), jnp.float32)] * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=64 * 2**20),
        interpret=interpret,
    )(unit_RCK, start_RCK, k_RCK, high_RKK, low_RKK, intra_RCC, enter_RC[:, None], lam_HK[:, None])
    return x_RCK, iterations_R1C[:, 0]


def _weigh(log_decay_BTH, beta_BTH, segment_ids_BT, *, chunk):
    """`ChunkWeights` of a sequence in chunks of 128."""
    del chunk
    call = lambda *gates: tuple(chunk_weights(*gates))
    gates = log_decay_BTH, beta_BTH, segment_ids_BT
    return ChunkWeights(*partitioned(call, gates, axes=("BTH", "BTH", "BT"), results=("NBHCC", "NBHC")))


BACKEND = chunked_lib.Backend(partial(fused.solve, _kernel, HALF), _weigh)


def _times(x, exact, *, transposed=False):
    """x @ exact, or x @ exact.T, with x in two parts."""
    high, low = _in_two_parts(x)
    return tiles.dot(high, exact, b_transposed=transposed) + tiles.dot(low, exact, b_transposed=transposed)


def _in_two_parts(x):
    """x as its leading 8 bits and the rest."""
    high = tiles.leading_bits(x)
    return high.astype(HALF), (x - high).astype(HALF)


def _sum_of_rows(x_CK):
    return jnp.sum(x_CK, axis=1, keepdims=True)
