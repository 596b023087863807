"""Mesa's solve on NVIDIA Hopper: one kernel for all iterations, one warpgroup a chunk (Pallas, Mosaic GPU).

The chunk's keys, mask and entering state are loaded once and stay on the SM while conjugate gradients run (mesanet.md
1.4, 1.5). Products are float16 with float32 sums, which keep what matters (mesanet.md 1.7.3): keys are exact, the state
is a sum of two float16 matrices, directions are rounded at unit size, and the first residual, which is large where
keys repeat, is computed from a starting point in two parts.

R chunks of all rows and heads (N*B*H), C tokens of a chunk, H heads, K key size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.checks import require
from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa import fused
from mesanet_kernels.ops.mesa.fused import ROUNDING, divide

CHUNK = 64  # rows of a warpgroup's matrix instruction
KEY_SIZES = (64, 128)
HALF = jnp.float16
HALF_BITS = 13  # the mantissa bits that float32 has more than float16
ROWS = plgpu.Layout.WGMMA


def mesa(options, q_BTHK, k_BTHK, *rest):
    """As `api.mesa`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("mesa", "pallas_gpu", lacks(options, q_BTHK, k_BTHK))
    return chunked_lib.mesa(_solve, options._replace(chunk=CHUNK), q_BTHK, k_BTHK, *rest)


def lacks(options, q_BTHK, k_BTHK):
    """What the call needs and the kernel has not, as the end of a sentence; "" where it can do it."""
    halves = (jnp.bfloat16, jnp.float16)
    reasons = {
        "needs an NVIDIA Hopper GPU": jax.default_backend() != "gpu" or jax.devices()[0].compute_capability != "9.0",
        f"has no solver {options.solver!r}": options.solver != "cg",
        "needs q and k in bfloat16 or float16": q_BTHK.dtype not in halves or k_BTHK.dtype not in halves,
        f"needs a key size in {KEY_SIZES}": k_BTHK.shape[-1] not in KEY_SIZES,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _kernel(unit_RCK, start_RCK, k_RCK, high_RKK, low_RKK, intra_RCC, enter_RC, lam_HK, *, max_iters, tol):
    """The kernel, as `fused` calls it."""
    chunks, chunk, size = unit_RCK.shape
    sum_of_rows = lambda x_CK: jnp.sum(x_CK, axis=1)
    per_row = lambda x_C: lax.broadcast_in_dim(x_C, (chunk, size), [0])

    def kernel(unit, start, k, high, low, intra, enter, lam, x_out, iterations_out, k_s, high_s, low_s, x_s, loaded):
        r = lax.axis_index("chunk")
        for barrier, (source, target) in enumerate(((k, k_s), (high, high_s), (low, low_s))):
            plgpu.copy_gmem_to_smem(source.at[r], target, loaded.at[barrier])
        intra_CC = _load(intra.at[r], ROWS)
        enter_C = _load(enter.at[r], ROWS.reduce(1))
        lam_CK = lax.broadcast_in_dim(_load(lam.at[r % lam_HK.shape[0]], ROWS.reduce(0)), (chunk, size), [1])
        x_CK = _load(start.at[r], ROWS)
        for barrier in range(3):
            plgpu.barrier_wait(loaded.at[barrier])

        def image(p_CK):
            """H_t p_t, of rows of about unit size, which float16 then holds."""

            def overlaps(sum_CC):
                plgpu.wgmma(sum_CC, p_CK.astype(HALF), k_s.transpose((1, 0)))
                return sum_CC[...]

            weighted_CC = (pl.run_scoped(overlaps, plgpu.ACC((chunk, chunk), jnp.float32)) * intra_CC).astype(HALF)
            entering_CK = (p_CK * per_row(enter_C)).astype(HALF)

            def read(sum_CK):
                plgpu.wgmma(sum_CK, weighted_CC, k_s)
                plgpu.wgmma(sum_CK, entering_CK, high_s)
                plgpu.wgmma(sum_CK, entering_CK, low_s)
                return sum_CK[...]

            return pl.run_scoped(read, plgpu.ACC((chunk, size), jnp.float32))

        # The residual of the starting point, whose rows are scaled to unit size and cut in two float16 parts.
        scale_CK = per_row(jnp.maximum(jnp.max(jnp.abs(x_CK), axis=1), ROUNDING**4))
        high_CK = _leading_bits(x_CK / scale_CK)
        low_CK = (x_CK / scale_CK - high_CK) * 2.0**HALF_BITS
        image_CK = scale_CK * (image(high_CK) + image(low_CK) * 2.0**-HALF_BITS)
        residual_CK = _load(unit.at[r], ROWS) - image_CK - lam_CK * x_CK
        x_s[...] = x_CK  # the least used of the iterates: registers hold the others
        delta_C = sum_of_rows(residual_CK * residual_CK)
        stop_C = max(tol, ROUNDING) ** 2 * delta_C

        def advance(state):
            step, residual_CK, direction_CK, delta_C, iterations_C = state
            active_C = delta_C > stop_C
            norm_CK = per_row(jnp.sqrt(jnp.where(active_C, delta_C, 1.0)))
            image_CK = norm_CK * image(direction_CK / norm_CK) + lam_CK * direction_CK
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
        iterations_out[r, ...] = iterations_C
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_s, x_out.at[r])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(unit_RCK.shape, jnp.float32), jax.ShapeDtypeStruct((chunks, chunk), jnp.int32)),
        grid=(chunks,),
        grid_names=("chunk",),
        scratch_types=[
            _shared(chunk, size, HALF),
            _shared(size, size, HALF),
            _shared(size, size, HALF),
            _shared(chunk, size, jnp.float32),
            plgpu.Barrier(num_barriers=3),
        ],
        # The default semantics infer the layouts of this kernel for minutes.
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(unit_RCK, start_RCK, k_RCK, high_RKK, low_RKK, intra_RCC, enter_RC, lam_HK)


def _shared(rows, columns, dtype):
    """A matrix in shared memory as the matrix instructions read it: 128 bytes wide tiles, swizzled."""
    tile = (8, 128 // jnp.dtype(dtype).itemsize)
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(128))
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def _load(ref, layout):
    return plgpu.load(ref, layout=layout, optimized=False)


def _leading_bits(x):
    """x cut to the mantissa of float16; by its bits, as a cast there and back may be taken for nothing."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(-(1 << HALF_BITS))
    return lax.bitcast_convert_type(bits, jnp.float32)


_solve = partial(fused.solve, _kernel, HALF)
