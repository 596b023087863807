"""One token of Mesa on NVIDIA Hopper: both states, all iterations of the solve and the readout in one kernel, one launch.

A warpgroup has a head of a row. The updated H_t stays in its registers (K^2 / 128 numbers a thread) while conjugate
gradients run in float32, so that a step moves each state once in and once out, which bounds its time.

R rows and heads (B*H, heads last), H heads, K key size, V value size.
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
ROW, COLUMN = MATRIX.reduce(1), MATRIX.reduce(0)  # of a vector that goes down the rows, or along the columns
AXES = ("BHK", "BHK", "BHV", "BHK", "BHK", "HK", "BHKK", "BHKV")
RESULTS = ("BHV", "BHKK", "BHKV", "BH")


def mesa_step_pallas_gpu(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV):
    """(o [B,H,V], new state, iterations [B,H]); `api.mesa_step` says what each argument is.

    Raises:
      NotImplementedError: the kernel does not support the call (`unsupported_reason`).
    """
    require(
        "mesa_step",
        "pallas_gpu",
        unsupported_reason(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV),
    )
    return _step(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _step(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, h_kk_BHKK, h_kv_BHKV):
    wide = lambda x: x.astype(jnp.float32)
    decay_BHK = jnp.broadcast_to(jnp.exp(wide(log_decay_BH))[..., None], k_BHK.shape)
    added_BHK = wide(k_BHK) * wide(beta_BH)[..., None]
    arrays = (wide(q_BHK), wide(k_BHK), wide(v_BHV), added_BHK, decay_BHK, wide(lam_HK), h_kk_BHKK, h_kv_BHKV)
    call = partial(_flat, partial(_kernel, max_iters=options.max_iters, tol=options.tol))
    o_BHV, h_kk_BHKK, h_kv_BHKV, iterations_BH = partitioned(call, arrays, axes=AXES, results=RESULTS)
    if options.tol == 0:  # rows that rest at rounding error have had all their steps
        iterations_BH = jnp.full_like(iterations_BH, options.max_iters)
    return o_BHV.astype(v_BHV.dtype), (h_kk_BHKK, h_kv_BHKV), iterations_BH


def _forward(options, *arrays):
    return _step(options, *arrays), arrays


def _backward(options, arrays, cotangents):
    """Decoding has no use for gradients, but they are those of one token of the op."""

    def outputs(q, k, v, log_decay, beta, lam, *state):
        row = [x[:, None] for x in (q, k, v, log_decay, beta)]
        o, state, _ = xla.mesa_xla(options, *row, lam, state, jnp.zeros(row[0].shape[:2], jnp.int32))
        return o[:, 0], state

    return jax.vjp(outputs, *arrays)[1](cotangents[:2])


_step.defvjp(_forward, _backward)


def unsupported_reason(options, q_BHK, k_BHK, v_BHV, log_decay_BH, beta_BH, lam_HK, *state):
    """Why the kernel cannot run this call; empty if it can."""
    if options.solver != "cg":
        return f"has no solver {options.solver!r}"
    if any(x.dtype != jnp.float32 for x in state):
        return "needs a float32 state"
    return tiles.unsupported_reason((k_BHK.shape[-1], v_BHV.shape[-1]))


def _flat(kernel, *arrays):
    """The kernel over all rows and heads at once."""
    *arrays, lam_HK, h_kk_BHKK, h_kv_BHKV = arrays
    batch, heads = arrays[0].shape[:2]
    flat = [x.reshape(-1, *x.shape[2:]) for x in (*arrays, h_kk_BHKK, h_kv_BHKV)]
    return [x.reshape(batch, heads, *x.shape[1:]) for x in kernel(*flat[:-2], lam_HK, *flat[-2:])]


def _kernel(q_RK, k_RK, v_RV, added_RK, decay_RK, lam_HK, h_kk_RKK, h_kv_RKV, *, max_iters, tol):
    """(o [R,V], h_kk, h_kv, iterations [R]), all float32 but the last."""
    (rows, size), width = q_RK.shape, v_RV.shape[-1]

    def step_of_head(q, k, v, added, decay, lam, h_kk, h_kv, o_out, h_kk_out, h_kv_out, iterations_out, vector_s):
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
            """(H + lam) p: p goes along the columns by way of shared memory, and the sums down the rows."""
            vector_s[...] = p_K
            return jnp.sum(h_KK * along(tiles.untiled(vector_s, COLUMN)), axis=1) + lam_K * p_K

        q_K = tiles.untiled(q.at[r], ROW)
        x_K = q_K / (diagonal_K + lam_K)
        residual_K = q_K - image(x_K)
        delta = jnp.sum(residual_K * residual_K)
        stop = max(tol, ROUNDING) ** 2 * delta

        def advance(state):
            step, x_K, residual_K, direction_K, delta = state
            image_K = image(direction_K)
            length = divide_positive(delta, jnp.sum(direction_K * image_K), True)
            x_K = x_K + length * direction_K
            residual_K = residual_K - length * image_K
            after = jnp.sum(residual_K * residual_K)
            return step + 1, x_K, residual_K, residual_K + divide_positive(after, delta, True) * direction_K, after

        state = (jnp.int32(0), x_K, residual_K, residual_K, delta)
        steps, x_K, *_ = lax.while_loop(lambda state: (state[0] < max_iters) & (state[4] > stop), advance, state)
        iterations_out[r] = steps

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
            reduction_scratch_bytes=4 * 4 * 128,  # a number of each warp and column
        ),
    )(q_RK, k_RK, v_RV, added_RK, decay_RK, lam_HK, h_kk_RKK, h_kv_RKV)
