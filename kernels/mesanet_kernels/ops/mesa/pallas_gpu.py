"""Mesa on NVIDIA Hopper, all of it in kernels: weights, states, solve, readout and their gradients (gpu/, solve_gpu.py).

As `chunked.mesa`. Products are of 16 bits with float32 sums. What a solve has made is the sum of two such parts, and so
are the states that it meets: where keys repeat, what a solution has in common with them is its last bits, which the
state makes large again (at 300 equal keys, single parts leave no correct digit of o).

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import optimization_barrier as barrier

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.gpu import recurrence
from mesanet_kernels.linear_recurrence.gpu.gradients import RecurrenceInputsGpu, gradients_gpu
from mesanet_kernels.linear_recurrence.gpu.readout import readout_gpu
from mesanet_kernels.linear_recurrence.gpu.states import states_gpu
from mesanet_kernels.linear_recurrence.gpu.weights import chunk_weights_gpu, gate_cotangents
from mesanet_kernels.ops.mesa import differentiable, solve_gpu
from mesanet_kernels.ops.mesa.options import MESA_SOLUTION
from mesanet_kernels.tiles import gpu as tiles

CHUNK = tiles.CHUNK
TWO = (jnp.bfloat16,) * 2  # parts of a state
LARGEST_STATE = 2.0**14  # of a matrix in float16, with room for the decay and the sum of both parts


def mesa_pallas_gpu(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """As `api.mesa`, in chunks of 64. Raises NotImplementedError for what the kernels lack."""
    require("mesa", "pallas_gpu", unsupported_reason(options, q_BTHK, k_BTHK, v_BTHV))
    arrays = q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT
    return differentiable.mesa_from_kernels(KERNELS, options, *arrays)


def unsupported_reason(options, q_BTHK, k_BTHK, v_BTHV, *_):
    """Why the kernels cannot run this call; empty if they can."""
    if options.solver != "cg":
        return f"has no solver {options.solver!r}"
    if any(x.dtype != jnp.bfloat16 for x in (q_BTHK, k_BTHK, v_BTHV)):
        return "needs q, k and v in bfloat16"
    return tiles.unsupported_reason((k_BTHK.shape[-1], v_BTHV.shape[-1]))


class ScaledSystems(NamedTuple):
    """What the solve needs of H for all chunks; each chunk's state is divided by a size that float16 can hold."""

    parts_NBHKK: tuple[jax.Array, jax.Array]
    diagonal_NBHK: jax.Array
    enter_NBHC: jax.Array  # times that size


class Kept(NamedTuple):
    """What the gradients need again, of whole chunks."""

    x_parts: tuple[jax.Array, jax.Array]  # the solution, [B,T,H,K]
    g_parts: tuple[jax.Array, jax.Array]  # [N,B,H,K,V]
    systems: ScaledSystems
    weights: chunks.ChunkWeights


KEPT = Kept(
    ("BTHK",) * 2, ("NBHKV",) * 2, ScaledSystems(("NBHKK",) * 2, "NBHK", "NBHC"), chunks.ChunkWeights("NBHCC", "NBHC")
)


def _solve_and_read(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, h_kk, h_kv, segment_ids_BT):
    length = q_BTHK.shape[1]
    q_BTHK, k_BTHK, v_BTHV = (chunks.pad_time(x, chunk=CHUNK) for x in (q_BTHK, k_BTHK, v_BTHV))
    weights = chunk_weights_gpu(log_decay_BTH, beta_BTH, segment_ids_BT)
    g_parts, final_h_kv = recurrence.entering_states(k_BTHK, v_BTHV, weights, h_kv, stored=TWO)
    systems, final_h_kk = scaled_systems(k_BTHK, weights, h_kk)
    x_parts, iterations_NBHC = solve_scaled_systems(options, systems, (q_BTHK,), k_BTHK, weights, lam_HK)
    # Named so that a rematerialisation policy can keep the one value that is expensive to recompute; what follows reads
    # the named one, or it would be recomputed for that.
    x_parts = tuple(checkpoint_name(part, MESA_SOLUTION) for part in x_parts)
    (o_BTHV,) = readout_gpu(x_parts, k_BTHK, v_BTHV, *weights, g_parts)
    iterations_BTH = chunks.from_chunks(iterations_NBHC, length)
    kept = jax.tree.leaves(Kept(x_parts, g_parts, systems, weights))
    return o_BTHV[:, :length], final_h_kk, final_h_kv, iterations_BTH, *kept


def _solve_and_differentiate(options, *arrays):
    """mesanet.md 1.6, as `chunked._backward`; its dlambda for each row of the batch, [B,H,K]."""
    k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, h_kk, h_kv, segment_ids_BT, *kept, do_BTHV, dh_kk, dh_kv = arrays
    x_parts, g_parts, systems, weights = jax.tree.unflatten(jax.tree.structure(KEPT), kept)
    length = k_BTHK.shape[1]
    k_BTHK, v_BTHV, do_BTHV = (chunks.pad_time(x, chunk=CHUNK) for x in (k_BTHK, v_BTHV, do_BTHV))

    # Of -dq*, since it is -e* that the second memory takes.
    minus_dx_parts = readout_gpu((do_BTHV,), v_BTHV, k_BTHK, *weights, g_parts, transposed=True, results=2, scale=-1.0)
    minus_e_parts, _ = solve_scaled_systems(options, systems, minus_dx_parts, k_BTHK, weights, lam_HK)

    # The gradients of sum(do . G q*) - sum(e* . H q*) at fixed q*: of two memories with the same keys.
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
    dlam_BHK = jnp.sum(_total(x_parts) * _total(minus_e_parts), axis=1)
    dq_BTHK, dk_BTHK, dv_BTHV = (x[:, :length] for x in (-minus_e_parts[0], dk_BTHK, dv_BTHV))
    return dq_BTHK, dk_BTHK, dv_BTHV, dlog_decay_BTH, dbeta_BTH, dlam_BHK, dh_kk.mT, dh_kv


def _total(parts):
    return sum(part.astype(jnp.float32) for part in parts)


def scaled_systems(k_BTHK, weights, h_kk_BHKK):
    """The `ScaledSystems` of a sequence and its final h_kk, from keys in whole chunks."""
    leave_NBHC, carry_NBH = weights.intra_NBHCC[..., -1, :], weights.enter_NBHC[..., -1]
    *scaled_inputs, size_NBH = scaled_recurrence(k_BTHK, leave_NBHC, carry_NBH, h_kk_BHKK)
    parts_NBHKK, final_BHKK = states_gpu(
        (k_BTHK,), (k_BTHK,), *scaled_inputs, factors=3, stored=(jnp.float16,) * 2, symmetric=True
    )
    diagonal_NBHK = jnp.diagonal(parts_NBHKK[0], axis1=-2, axis2=-1).astype(jnp.float32)
    systems = ScaledSystems(parts_NBHKK, diagonal_NBHK, weights.enter_NBHC * size_NBH[:-1, ..., None])
    return systems, final_BHKK * size_NBH[-1, ..., None, None]


def scaled_recurrence(k_BTHK, leave_NBHC, carry_NBH, h_kk_BHKK):
    """The weights, carries and initial state of a recurrence whose states are H divided by sizes [N+1,B,H]; the sizes.

    H is positive semidefinite: no entry exceeds the largest on its diagonal, and that grows by at most what is written.
    """
    largest_BTH = jnp.max(jnp.square(k_BTHK.astype(jnp.float32)), axis=-1)
    written_NBH = jnp.sum(leave_NBHC * chunks.to_chunks(largest_BTH, CHUNK), axis=-1)
    # Without the first barrier the compiler evaluates the maximum of the usual first state, zeros, itself: for seconds;
    # without the second it lets one thread look for the maximum of a head, where there are few.
    first_BH = barrier(jnp.max(jnp.abs(barrier(h_kk_BHKK)), axis=(-2, -1)))
    bound_NBH = jnp.cumsum(jnp.concatenate([first_BH[None], written_NBH]), axis=0)
    size_NBH = jnp.maximum(bound_NBH / LARGEST_STATE, 1.0)
    entering_NBH, leaving_NBH = size_NBH[:-1], size_NBH[1:]
    weight_NBHC = leave_NBHC / leaving_NBH[..., None]
    return weight_NBHC, carry_NBH * entering_NBH / leaving_NBH, h_kk_BHKK / size_NBH[0, ..., None, None], size_NBH


def solve_scaled_systems(options, systems, rhs_parts, k_BTHK, weights, lam_HK):
    """`solve_gpu.solve_systems_gpu`."""
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


KERNELS = differentiable.MesaKernels(_solve_and_read, _solve_and_differentiate, tuple(jax.tree.leaves(KEPT)))
