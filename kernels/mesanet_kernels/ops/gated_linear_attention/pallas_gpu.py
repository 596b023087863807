"""Gated linear attention with one decay per head on NVIDIA Hopper, composed of the kernels in linear_recurrence/gpu.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence.gpu import recurrence
from mesanet_kernels.linear_recurrence.gpu.gradients import RecurrenceInputsGpu, gradients_gpu
from mesanet_kernels.linear_recurrence.gpu.readout import readout_gpu
from mesanet_kernels.linear_recurrence.gpu.weights import chunk_weights_gpu
from mesanet_kernels.ops.gated_linear_attention import differentiable
from mesanet_kernels.tiles import gpu as tiles

CHUNK = tiles.CHUNK


def gated_linear_attention_pallas_gpu(chunk, *inputs):
    """Returns (o [B, T, H, V], final state [B, H, K, V]), in chunks of 64; the arguments are those of the api.

    Raises:
      NotImplementedError: the kernels cannot run this call.
    """
    require("gated_linear_attention", "pallas_gpu", unsupported_reason(chunk, *inputs))
    return differentiable.gated_linear_attention_from_kernels(KERNELS, *inputs)


def unsupported_reason(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay, *_):
    """Returns why this call is not supported, as the end of a sentence; empty if it is."""
    if log_decay.ndim == 4:
        return "needs one decay per head, not one per key channel"
    if any(x.dtype != jnp.bfloat16 for x in (q_BTHK, k_BTHK, v_BTHV)):
        return "needs q, k and v in bfloat16"
    return tiles.unsupported_reason((k_BTHK.shape[-1], v_BTHV.shape[-1]))


def _forward(q_BTHK, k_BTHK, v_BTHV, weights, state_BHKV):
    """Returns (o, final state), as `GatedLinearAttentionKernels.forward` does."""
    states, final_BHKV = recurrence.entering_states(k_BTHK, v_BTHV, weights, state_BHKV)
    (o_BTHV,) = readout_gpu((q_BTHK,), k_BTHK, v_BTHV, weights, states)
    return o_BTHV, final_BHKV


def _backward(q_BTHK, k_BTHK, v_BTHV, weights, state_BHKV, do_BTHV, dfinal_BHKV):
    """Returns the cotangents, as `GatedLinearAttentionKernels.backward` does."""
    states, _ = recurrence.entering_states(k_BTHK, v_BTHV, weights, state_BHKV)
    dstates, dstate_BHKV = recurrence.leaving_state_cotangents((q_BTHK,), (do_BTHV,), weights, dfinal_BHKV)
    (dq_BTHK,) = readout_gpu((do_BTHV,), v_BTHV, k_BTHK, weights, states, transposed=True)
    recurrence_inputs = RecurrenceInputsGpu(v_BTHV, (do_BTHV,), states, dstates)
    found = gradients_gpu((q_BTHK,), k_BTHK, weights, (recurrence_inputs,))
    return dq_BTHK, found.dk_BTHK, *found.dv_BTHV, recurrence.weight_cotangents(found), dstate_BHKV


KERNELS = differentiable.GatedLinearAttentionKernels(CHUNK, chunk_weights_gpu, _forward, _backward)
