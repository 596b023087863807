"""One token of Mesa on NVIDIA Hopper: both states, all iterations of the solve and the readout in a single kernel.

One warpgroup computes one head of one row. The updated H_t stays in its registers (K^2 / 128 numbers per thread) while
conjugate gradients run in float32, so each state is read once and written once, and that bounds the time.

R rows and heads (B * H, heads last), H heads, K key size, V value size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.dispatch import require
from mesanet_kernels.ops.mesa import xla
from mesanet_kernels.ops.mesa.solver import ROUNDING, divide_positive
from mesanet_kernels.partition import partitioned
from mesanet_kernels.tiles import gpu as tiles

MATRIX = tiles.ROWS
# Layouts of vectors with one number per row of a matrix, and with one number per column.
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)
AXES = ("BHK", "BHK", "BHV", "BHK", "BHK", "HK", "BHKK", "BHKV")
RESULTS = ("BHV", "BHKK", "BHKV", "BH")


def mesa_step_pallas_gpu(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV):
    """Returns (o [B, H, V], new (h_kk, h_kv), iterations [B, H]) with the arguments of `api.mesa_step`.

    Raises:
      NotImplementedError: the kernel does not support the call (`unsupported_reason`).
    """
    require(
        "mesa_step",
        "pallas_gpu",
        unsupported_reason(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV),
    )
    return _step(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV)


def _run(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV):
    """Returns what `mesa_step_pallas_gpu` does, with each device computing its own rows and heads."""
    wide = lambda x: x.astype(jnp.float32)
    decay_BHK = jnp.broadcast_to(jnp.exp(wide(log_decay_BH))[..., None], k_BHK.shape)
    added_BHK = wide(k_BHK) * wide(beta_BH)[..., None]
    arrays = (wide(q_BHK), wide(k_BHK), wide(v_BHV), added_BHK, decay_BHK, wide(lam_HK), h_kk_BHKK, h_kv_BHKV)
    call = partial(_flat, partial(_kernel, max_iters=options.max_iters, tol=options.tol))
    o_BHV, h_kk_BHKK, h_kv_BHKV, iterations_BH = partitioned(call, arrays, axes=AXES, results=RESULTS)
    if options.tol == 0:  # a token that stops at rounding error counts as one that has run all iterations
        iterations_BH = jnp.full_like(iterations_BH, options.max_iters)
    return o_BHV.astype(v_BHV.dtype), (h_kk_BHKK, h_kv_BHKV), iterations_BH


def _forward(options, *arrays):
    """Returns the results, and the arguments for the backward pass."""
    return _step(options, *arrays), arrays


def _backward(options, arrays, cotangents):
    """Returns the gradients of all arguments: those of a row of one token in plain XLA."""

    def outputs(q, k, v, log_decay, beta, lam, *state):
        row = [x[:, None] for x in (q, k, v, log_decay, beta)]
        segment_ids = jnp.zeros(row[0].shape[:2], jnp.int32)
        o, state, _ = xla.mesa_xla(options, *row, lam, state, segment_ids)
        return o[:, 0], state

    return jax.vjp(outputs, *arrays)[1](cotangents[:2])


_step = jax.custom_vjp(_run, nondiff_argnums=(0,))
_step.defvjp(_forward, _backward)


def unsupported_reason(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, *state):
    """Returns why this call is not supported, as the end of a sentence; empty if it is."""
    if options.solver != "cg":
        return f"has no solver {options.solver!r}"
    if any(x.dtype != jnp.float32 for x in state):
        return "needs a float32 state"
    return tiles.unsupported_reason((k_BHK.shape[-1], v_BHV.shape[-1]))


def _flat(kernel, *arrays):
    """Calls the kernel on arrays [B, H, ...] with B and H merged, and separates them in its results."""
    *arrays, lam_HK, h_kk_BHKK, h_kv_BHKV = arrays
    batch, heads = arrays[0].shape[:2]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (*arrays, h_kk_BHKK, h_kv_BHKV)]
    return [x.reshape(batch, heads, *x.shape[1:]) for x in kernel(*flat[:-2], lam_HK, *flat[-2:])]


def _kernel(q_RK, k_RK, v_RV, added_RK, decay_RK, lam_HK, h_kk_RKK, h_kv_RKV, *, max_iters, tol):
    """Runs the kernel.

    Args:
      q_RK, k_RK, v_RV: query, key and value, like all arrays float32.
      added_RK: beta * k, what the key is multiplied by when it is added to the states.
      decay_RK: the decay, repeated K times so that it can be loaded like a key.
      lam_HK: lambda.
      h_kk_RKK, h_kv_RKV: the states before this token.
      max_iters, tol: as in `api.mesa_step`.

    Returns:
      (o [R, V], h_kk [R, K, K], h_kv [R, K, V], iterations [R] int32).
    """
    (rows, size), width = q_RK.shape, v_RV.shape[-1]

    def step_of_head(q, k, v, added, decay, lam, h_kk, h_kv, o_out, h_kk_out, h_kv_out, iterations_out, vector_s):
        """Computes one head of one row."""
        r = lax.axis_index("row")
        down = lambda x_K, columns: lax.broadcast_in_dim(x_K, (size, columns), [0])
        along = lambda x_V: lax.broadcast_in_dim(x_V, (size, x_V.shape[0]), [1])
        added_K, decay_K = tiles.untiled(added.at[r], ROW), tiles.untiled(decay.at[r], ROW)
        lam_K = tiles.untiled(lam.at[r % lam_HK.shape[0]], ROW)

        h_KK = down(decay_K, size) * tiles.untiled(h_kk.at[r], MATRIX) + down(added_K, size) * along(
            tiles.untiled(k.at[r], COLUMN)
        )
        h_kk_out[r, ...] = h_KK
        on_diagonal_KK = plgpu.broadcasted_iota(jnp.int32, (size, size), 0, layout=MATRIX) == plgpu.broadcasted_iota(
            jnp.int32, (size, size), 1, layout=MATRIX
        )
        diagonal_K = jnp.sum(jnp.where(on_diagonal_KK, h_KK, 0.0), axis=1)

        def image(p_K):
            """Returns (H + Lambda) p in layout `ROW`; p changes to layout `COLUMN` by way of shared memory."""
            vector_s[...] = p_K
            return jnp.sum(h_KK * along(tiles.untiled(vector_s, COLUMN)), axis=1) + lam_K * p_K

        q_K = tiles.untiled(q.at[r], ROW)
        x_K = q_K / (diagonal_K + lam_K)
        residual_K = q_K - image(x_K)
        delta = jnp.sum(residual_K * residual_K)
        stop = max(tol, ROUNDING) ** 2 * delta

        def advance(state):
            """Runs one iteration; the state is (its number, x, residual, direction, squared norm of the residual)."""
            iteration, x_K, residual_K, direction_K, delta = state
            image_K = image(direction_K)
            length = divide_positive(delta, jnp.sum(direction_K * image_K), True)
            x_K = x_K + length * direction_K
            residual_K = residual_K - length * image_K
            after = jnp.sum(residual_K * residual_K)
            return iteration + 1, x_K, residual_K, residual_K + divide_positive(after, delta, True) * direction_K, after

        state = (jnp.int32(0), x_K, residual_K, residual_K, delta)
        iterations, x_K, *_ = lax.while_loop(lambda state: (state[0] < max_iters) & (state[4] > stop), advance, state)
        iterations_out[r] = iterations

        g_KV = down(decay_K, width) * tiles.untiled(h_kv.at[r], MATRIX) + down(added_K, width) * along(
            tiles.untiled(v.at[r], COLUMN)
        )
        h_kv_out[r, ...] = g_KV
        o_out[r, ...] = jnp.sum(down(x_K, width) * g_KV, axis=0)

    return plgpu.kernel(
        step_of_head,
        out_type=(
            jax.ShapeDtypeStruct((rows, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, size, size), jnp.float32),
            jax.ShapeDtypeStruct((rows, size, width), jnp.float32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ),
        grid=(rows,),
        grid_names=("row",),
        scratch_types=[plgpu.SMEM((size,), jnp.float32)],
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=4 * 4 * 128,  # one number for each warp and column
        ),
    )(q_RK, k_RK, v_RV, added_RK, decay_RK, lam_HK, h_kk_RKK, h_kv_RKV)
