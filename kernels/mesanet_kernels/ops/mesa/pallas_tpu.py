"""Mesa on TPUs, all of it in kernels: weights, states, solve, readout and their gradients.

The maths is that of chunked.py; the kernels are those of linear_recurrence/tpu and solve_tpu.py. The matrix unit
multiplies bfloat16. Solutions, and the states that they are multiplied with, are multiplied as sums of several bfloat16
parts: where keys repeat, what a solution has in common with them is in its last bits, which the state makes large again
(docs/mesa.md, "Numerics"). The forward pass writes no states except the last: the solve carries H in VMEM, and the
readout G.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.tpu.forward import forward_tpu
from mesanet_kernels.linear_recurrence.tpu.gradients import RecurrenceInputsTpu, gradients_tpu
from mesanet_kernels.linear_recurrence.tpu.states import states_tpu
from mesanet_kernels.linear_recurrence.tpu.weights import chunk_weights_tpu
from mesanet_kernels.ops.mesa import differentiable, solve_tpu
from mesanet_kernels.ops.mesa.options import MESA_SOLUTION
from mesanet_kernels.tiles import tpu as tiles

CHUNK = tiles.CHUNK
SIZES = (64, 128)


def mesa_pallas_tpu(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """Returns (o [B, T, H, V], (h_kk, h_kv), iterations [B, T, H]) with the arguments of `api.mesa`.

    It computes in chunks of 128.

    Raises:
      NotImplementedError: the kernels cannot run this call.
    """
    require("mesa", "pallas_tpu", unsupported_reason(options, q_BTHK, k_BTHK, v_BTHV))
    arrays = q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT
    return differentiable.mesa_from_kernels(KERNELS, options, *arrays)


def unsupported_reason(options, q_BTHK, k_BTHK, v_BTHV, *_):
    """Returns why this call is not supported, as the end of a sentence; empty if it is."""
    arrays = q_BTHK, k_BTHK, v_BTHV
    reasons = {
        f"has no solver {options.solver!r}": options.solver != "cg",
        "needs q, k and v in bfloat16": any(x.dtype != jnp.bfloat16 for x in arrays),
        f"needs key and value sizes in {SIZES}": any(x.shape[-1] not in SIZES for x in arrays),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _solve_and_read(options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, h_kk, h_kv, segment_ids_BT):
    """Returns the results and what is kept, as `MesaKernels.forward` does."""
    length = q_BTHK.shape[1]
    q_BTHK, k_BTHK, v_BTHV = (chunks.pad_time(x, chunk=CHUNK) for x in (q_BTHK, k_BTHK, v_BTHV))
    weights = chunk_weights_tpu(log_decay_BTH, beta_BTH, segment_ids_BT)
    x_BTHK, final_h_kk, iterations_NBHC = _solve(options, q_BTHK, k_BTHK, weights, lam_HK, h_kk)
    # Named so that a rematerialisation policy can keep the one value that is expensive to recompute. Everything below
    # must read the named value: the unnamed one would be recomputed.
    x_BTHK = checkpoint_name(x_BTHK, MESA_SOLUTION)
    o_BTHV, final_h_kv = forward_tpu(x_BTHK, k_BTHK, v_BTHV, weights, h_kv, parts=tiles.EXACT)
    iterations_BTH = chunks.from_chunks(iterations_NBHC, length)
    return o_BTHV[:, :length], final_h_kk, final_h_kv, iterations_BTH, x_BTHK[:, :length]


def _solve_and_differentiate(options, *arrays):
    """Returns the gradients, as `MesaKernels.backward` does (docs/mesa.md, "Its gradient")."""
    k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, h_kk, h_kv, segment_ids_BT, x_BTHK, do_BTHV, dh_kk, dh_kv = arrays
    length = k_BTHK.shape[1]
    k_BTHK, v_BTHV, do_BTHV, x_BTHK = (chunks.pad_time(x, chunk=CHUNK) for x in (k_BTHK, v_BTHV, do_BTHV, x_BTHK))
    weigh = partial(chunk_weights_tpu, segment_ids_BT=segment_ids_BT)
    weights, gates_gradients = jax.vjp(weigh, log_decay_BTH, beta_BTH)

    # The systems are solved for -dq*, because -e* is the output cotangent of the second recurrence below.
    minus_dx_BTHK, _ = forward_tpu(-do_BTHV, v_BTHV, k_BTHK, weights, h_kv.mT, parts=tiles.EXACT, dtype=jnp.float32)
    minus_e_BTHK, *_ = _solve(options, minus_dx_BTHK, k_BTHK, weights, lam_HK, h_kk)

    # The gradients of sum(do . G q*) - sum(e* . H q*) at fixed q* and e*: those of two recurrences with the same keys.
    g_NBHKV = states_tpu(k_BTHK, v_BTHV, weights, h_kv, dtype=jnp.float32)
    h_NBHKK = states_tpu(k_BTHK, k_BTHK, weights, h_kk.mT, dtype=jnp.float32)
    recurrences = (
        RecurrenceInputsTpu(v_BTHV, do_BTHV, g_NBHKV, dh_kv),
        RecurrenceInputsTpu(k_BTHK, minus_e_BTHK, h_NBHKK, dh_kk.mT),
    )
    found = gradients_tpu(x_BTHK, k_BTHK, weights, recurrences, queries=False)
    dlog_decay_BTH, dbeta_BTH = gates_gradients(found.dweights)
    (dv_BTHV, dk_as_value_BTHK), (dh_kv, dh_kk) = found.dv_BTHV, found.dinitial_BHKV
    dk_BTHK = (found.dk_BTHK.astype(jnp.float32) + dk_as_value_BTHK).astype(k_BTHK.dtype)
    dlam_BHK = jnp.sum(x_BTHK * minus_e_BTHK, axis=1)
    dq_BTHK, dk_BTHK, dv_BTHV = (x[:, :length] for x in ((-minus_e_BTHK).astype(k_BTHK.dtype), dk_BTHK, dv_BTHV))
    return dq_BTHK, dk_BTHK, dv_BTHV, dlog_decay_BTH, dbeta_BTH, dlam_BHK, dh_kk.mT, dh_kv


def _solve(options, *arrays):
    """Returns what `solve_systems_tpu` returns for these arrays."""
    return solve_tpu.solve_systems_tpu(*arrays, max_iters=options.max_iters, tol=options.tol)


KERNELS = differentiable.MesaKernels(_solve_and_read, _solve_and_differentiate, kept=("BTHK",))
