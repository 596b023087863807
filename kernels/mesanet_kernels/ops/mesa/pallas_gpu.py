"""Mesa's solve on NVIDIA Hopper: one kernel for all iterations, one warpgroup a chunk (Pallas, Mosaic GPU).

The chunk's keys, mask and entering state are loaded once and stay on the SM while conjugate gradients run (mesanet.md
1.4, 1.5; hopper_solve.py). States, readout and gradients are XLA's (chunked.py).

R chunks of all rows and heads (N*B*H), C tokens of a chunk, H heads, K key size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.checks import require
from mesanet_kernels.gpu import tiles
from mesanet_kernels.ops.mesa import chunked as chunked_lib
from mesanet_kernels.ops.mesa import fused
from mesanet_kernels.ops.mesa.hopper_solve import HALF, Operator, iterate

CHUNK, KEY_SIZES, ROWS = tiles.CHUNK, tiles.SIZES, tiles.ROWS


def mesa(options, q_BTHK, k_BTHK, *rest):
    """As `api.mesa`. Raises NotImplementedError where the kernel lacks what the call needs."""
    require("mesa", "pallas_gpu", lacks(options, q_BTHK, k_BTHK))
    return chunked_lib.mesa(_solve, options._replace(chunk=CHUNK), q_BTHK, k_BTHK, *rest)


def lacks(options, q_BTHK, k_BTHK, *_):
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

    def kernel(unit, start, k, high, low, intra, enter, lam, x_out, iterations_out, k_s, high_s, low_s, x_s, loaded):
        r = lax.axis_index("chunk")
        for barrier, (source, target) in enumerate(((k, k_s), (high, high_s), (low, low_s))):
            plgpu.copy_gmem_to_smem(source.at[r], target, loaded.at[barrier])
        intra_CC = tiles.untiled(intra.at[r], ROWS)
        enter_C = tiles.untiled(enter.at[r], ROWS.reduce(1))
        lam_CK = lax.broadcast_in_dim(tiles.untiled(lam.at[r % lam_HK.shape[0]], ROWS.reduce(0)), (chunk, size), [1])
        x_CK = tiles.untiled(start.at[r], ROWS)
        for barrier in range(3):
            plgpu.barrier_wait(loaded.at[barrier])
        operator = Operator(k_s, high_s, low_s, intra_CC, enter_C, lam_CK)
        iterations_out[r, ...] = iterate(
            operator, lambda: tiles.untiled(unit.at[r], ROWS), x_CK, x_s, max_iters=max_iters, tol=tol
        )
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_s, x_out.at[r])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        kernel,
        out_type=(jax.ShapeDtypeStruct(unit_RCK.shape, jnp.float32), jax.ShapeDtypeStruct((chunks, chunk), jnp.int32)),
        grid=(chunks,),
        grid_names=("chunk",),
        scratch_types=[
            tiles.shared(chunk, size, dtype=HALF),
            tiles.shared(size, size, dtype=HALF),
            tiles.shared(size, size, dtype=HALF),
            tiles.shared(chunk, size, dtype=jnp.float32),
            plgpu.Barrier(num_barriers=3),
        ],
        compiler_params=tiles.COMPILER,
    )(unit_RCK, start_RCK, k_RCK, high_RKK, low_RKK, intra_RCC, enter_RC, lam_HK)


_solve = partial(fused.solve, _kernel, HALF)
