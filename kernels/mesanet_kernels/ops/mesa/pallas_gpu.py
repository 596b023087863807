"""Mesa on NVIDIA Hopper, all of it in kernels: weights, states, solve, readout and their gradients.

The maths is that of chunked.py; the kernels are those of linear_recurrence/gpu and solve_gpu.py. Products have 16-bit
operands and float32 sums. Every solution is the sum of two bfloat16 parts, and so are the states that it is multiplied
with: where keys repeat, what a solution has in common with them is in its last bits, which the state makes large again
(with 300 equal keys and single parts, no digit of o is correct). docs/mesa.md, "Numerics".

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import optimization_barrier as barrier

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.linear_recurrence.gpu import recurrence
from mesanet_kernels.linear_recurrence.gpu.gradients import RecurrenceInputsGpu, gradients_gpu
from mesanet_kernels.linear_recurrence.gpu.readout import readout_gpu
from mesanet_kernels.linear_recurrence.gpu.states import states_gpu
from mesanet_kernels.linear_recurrence.gpu.weights import chunk_weights_gpu, gate_cotangents
from mesanet_kernels.ops.mesa import differentiable, solve_gpu
from mesanet_kernels.ops.mesa.options import MESA_SOLUTION, MesaOptions
from mesanet_kernels.tiles import gpu as tiles

CHUNK = tiles.CHUNK
TWO = (jnp.bfloat16,) * 2  # dtypes of the two parts of a state
LARGEST_STATE = 2.0**14  # largest entry of a state in float16; leaves room for rounding and for the sum of both parts


def mesa_pallas_gpu(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """Returns (o [B, T, H, V], (h_kk, h_kv), iterations [B, T, H]) with the arguments of `api.mesa`.

    It computes in chunks of 64.

    Raises:
      NotImplementedError: the kernels cannot run this call.
    """
    require("mesa", "pallas_gpu", unsupported_reason(options, q_BTHK, k_BTHK, v_BTHV))
    arrays = q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT
    return differentiable.mesa_from_kernels(KERNELS, options, *arrays)


def unsupported_reason(options, q_BTHK, k_BTHK, v_BTHV, *_):
    """Returns why this call is not supported, as the end of a sentence; empty if it is."""
    if options.solver != "cg":
        return f"has no solver {options.solver!r}"
    if any(x.dtype != jnp.bfloat16 for x in (q_BTHK, k_BTHK, v_BTHV)):
        return "needs q, k and v in bfloat16"
    return tiles.unsupported_reason((k_BTHK.shape[-1], v_BTHV.shape[-1]))


class ScaledSystems(NamedTuple):
    """What the solve needs of H, with the state of each chunk divided by a scale so that float16 can hold it.

    Attributes:
      parts_NBHKK: two float16 arrays, whose sum is the scaled state that enters each chunk. Blocks below the diagonal
        are uninitialised.
      diagonal_NBHK: the diagonal of the scaled states, float32.
      enter_NBHC: the weights of the entering states (`ChunkWeights`), multiplied by the scale.
    """

    parts_NBHKK: tuple[Any, ...]
    diagonal_NBHK: Any
    enter_NBHC: Any


class Kept(NamedTuple):
    """What the forward pass keeps for the backward pass, padded to whole chunks.

    Attributes:
      x_parts: two bfloat16 arrays [B, T, H, K], whose sum is the solution q*.
      g_parts: two bfloat16 arrays [N, B, H, K, V], whose sum is the states G^T that enter each chunk.
    """

    x_parts: tuple[Any, ...]
    g_parts: tuple[Any, ...]
    systems: ScaledSystems
    weights: Any


# The axes of every array in `Kept`.
KEPT_AXES = Kept(
    x_parts=("BTHK",) * 2,
    g_parts=("NBHKV",) * 2,
    systems=ScaledSystems(("NBHKK",) * 2, "NBHK", "NBHC"),
    weights=("NBHCC", "NBHC"),
)


def _solve_and_read(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, h_kk, h_kv, segment_ids_BT):
    """Returns the results and what is kept, as `MesaKernels.forward` does."""
    length = q_BTHK.shape[1]
    q_BTHK, k_BTHK, v_BTHV = (chunks.pad_time(x, chunk=CHUNK) for x in (q_BTHK, k_BTHK, v_BTHV))
    weights = chunk_weights_gpu(log_decay_BTH, beta_BTH, segment_ids_BT)
    g_parts, final_h_kv = recurrence.entering_states(k_BTHK, v_BTHV, weights, h_kv, stored=TWO)
    systems, final_h_kk = scaled_systems(k_BTHK, weights, h_kk)
    x_parts, iterations_NBHC = solve_scaled_systems(options, systems, (q_BTHK,), k_BTHK, weights, lam_HK)
    # Named so that a rematerialisation policy can keep the one value that is expensive to recompute. Everything below
    # must read the named value: the unnamed one would be recomputed.
    x_parts = tuple(checkpoint_name(part, MESA_SOLUTION) for part in x_parts)
    (o_BTHV,) = readout_gpu(x_parts, k_BTHK, v_BTHV, weights, g_parts)
    iterations_BTH = chunks.from_chunks(iterations_NBHC, length)
    kept = jax.tree.leaves(Kept(x_parts, g_parts, systems, tuple(weights)))
    return o_BTHV[:, :length], final_h_kk, final_h_kv, iterations_BTH, *kept


def _solve_and_differentiate(options, *arrays):
    """Returns the gradients, as `MesaKernels.backward` does (docs/mesa.md, "Its gradient")."""
    k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, h_kk, h_kv, segment_ids_BT, *kept, do_BTHV, dh_kk, dh_kv = arrays
    x_parts, g_parts, systems, weights = jax.tree.unflatten(jax.tree.structure(KEPT_AXES), kept)
    weights = ChunkWeights(*weights)
    length = k_BTHK.shape[1]
    k_BTHK, v_BTHV, do_BTHV = (chunks.pad_time(x, chunk=CHUNK) for x in (k_BTHK, v_BTHV, do_BTHV))

    # The systems are solved for -dq*, because -e* is the output cotangent of the second recurrence below.
    minus_dx_parts = readout_gpu((do_BTHV,), v_BTHV, k_BTHK, weights, g_parts, transposed=True, results=2, scale=-1.0)
    minus_e_parts, _ = solve_scaled_systems(options, systems, minus_dx_parts, k_BTHK, weights, lam_HK)

    # The gradients of sum(do . G q*) - sum(e* . H q*) at fixed q* and e*: those of two recurrences with the same keys.
    h_parts, _ = recurrence.entering_states(k_BTHK, k_BTHK, weights, h_kk.mT, factors=2, stored=TWO)
    dg_parts, dh_kv = recurrence.leaving_state_cotangents(x_parts, (do_BTHV,), weights, dh_kv, stored=TWO)
    dh_parts, dh_kk = recurrence.leaving_state_cotangents(
        x_parts, minus_e_parts, weights, dh_kk.mT, factors=2, stored=TWO
    )
    recurrences = (
        RecurrenceInputsGpu(v_BTHV, (do_BTHV,), g_parts, dg_parts),
        RecurrenceInputsGpu(k_BTHK, minus_e_parts, h_parts, dh_parts),
    )
    found = gradients_gpu(x_parts, k_BTHK, weights, recurrences)
    dweights = recurrence.weight_cotangents(found)
    dlog_decay_BTH, dbeta_BTH = gate_cotangents(log_decay_BTH, beta_BTH, segment_ids_BT, weights, dweights)
    dv_BTHV, dk_as_value_BTHK = found.dv_BTHV
    dk_BTHK = (found.dk_BTHK.astype(jnp.float32) + dk_as_value_BTHK).astype(k_BTHK.dtype)
    dlam_BHK = jnp.sum(_sum_parts(x_parts) * _sum_parts(minus_e_parts), axis=1)
    dq_BTHK, dk_BTHK, dv_BTHV = (x[:, :length] for x in (-minus_e_parts[0], dk_BTHK, dv_BTHV))
    return dq_BTHK, dk_BTHK, dv_BTHV, dlog_decay_BTH, dbeta_BTH, dlam_BHK, dh_kk.mT, dh_kv


def _sum_parts(parts):
    """Returns the float32 sum of parts."""
    return sum(part.astype(jnp.float32) for part in parts)


def scaled_systems(k_BTHK, weights: ChunkWeights, h_kk_BHKK) -> tuple[ScaledSystems, jax.Array]:
    """Returns the `ScaledSystems` of a sequence and its final h_kk [B, H, K, K], unscaled.

    Args:
      k_BTHK: keys, bfloat16, with T a multiple of 64.
      h_kk_BHKK: the initial state, float32.
    """
    *scaled_inputs, scale_NBH = scaled_recurrence(k_BTHK, weights.leave_NBHC, weights.carry_NBH, h_kk_BHKK)
    parts_NBHKK, final_BHKK = states_gpu(
        (k_BTHK,), (k_BTHK,), *scaled_inputs, factors=3, stored=(jnp.float16,) * 2, symmetric=True
    )
    diagonal_NBHK = jnp.diagonal(parts_NBHKK[0], axis1=-2, axis2=-1).astype(jnp.float32)
    systems = ScaledSystems(parts_NBHKK, diagonal_NBHK, weights.enter_NBHC * scale_NBH[:-1, ..., None])
    return systems, final_BHKK * scale_NBH[-1, ..., None, None]


def scaled_recurrence(k_BTHK, leave_NBHC, carry_NBH, h_kk_BHKK):
    """Returns the recurrence of the states H divided by a scale per chunk, so that float16 can hold them.

    H is positive semidefinite, so no entry exceeds the largest one on its diagonal, and that one grows by at most what
    is written to the diagonal.

    Args:
      k_BTHK: keys, bfloat16, T = N C.
      leave_NBHC, carry_NBH: weights of the unscaled recurrence.
      h_kk_BHKK: its initial state.

    Returns:
      (weights [N, B, H, C], carries [N, B, H], initial state [B, H, K, K], scales [N + 1, B, H] of the states that
      enter each chunk and of the last one; at least 1).
    """
    largest_BTH = jnp.max(jnp.square(k_BTHK.astype(jnp.float32)), axis=-1)
    written_NBH = jnp.sum(leave_NBHC * chunks.to_chunks(largest_BTH, CHUNK), axis=-1)
    # The inner barrier keeps the compiler from evaluating the maximum of the usual initial state, zeros, at compile
    # time, which takes seconds. The outer barrier keeps it from a reduction in which one thread searches a whole head,
    # which is slow with few heads.
    first_BH = barrier(jnp.max(jnp.abs(barrier(h_kk_BHKK)), axis=(-2, -1)))
    bound_NBH = jnp.cumsum(jnp.concatenate([first_BH[None], written_NBH]), axis=0)
    scale_NBH = jnp.maximum(bound_NBH / LARGEST_STATE, 1.0)
    entering_NBH, leaving_NBH = scale_NBH[:-1], scale_NBH[1:]
    weight_NBHC = leave_NBHC / leaving_NBH[..., None]
    return weight_NBHC, carry_NBH * entering_NBH / leaving_NBH, h_kk_BHKK / scale_NBH[0, ..., None, None], scale_NBH


def solve_scaled_systems(
    options: MesaOptions, systems: ScaledSystems, rhs_parts, k_BTHK, weights: ChunkWeights, lam_HK
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the solutions and iterations of `solve_gpu.solve_systems_gpu`."""
    return solve_gpu.solve_systems_gpu(
        rhs_parts,
        k_BTHK,
        systems.parts_NBHKK,
        systems.diagonal_NBHK,
        weights.intra_NBHCC,
        systems.enter_NBHC,
        lam_HK,
        max_iters=options.max_iters,
        tol=options.tol,
    )


KERNELS = differentiable.MesaKernels(_solve_and_read, _solve_and_differentiate, tuple(jax.tree.leaves(KEPT_AXES)))
