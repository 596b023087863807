"""Gated linear attention with one decay per head on TPUs, composed of the kernels in linear_recurrence/tpu.

B batch, T time, H heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels.dispatch import require
from mesanet_kernels.linear_recurrence.tpu.forward import forward_tpu
from mesanet_kernels.linear_recurrence.tpu.gradients import RecurrenceInputsTpu, gradients_tpu
from mesanet_kernels.linear_recurrence.tpu.states import states_tpu
from mesanet_kernels.linear_recurrence.tpu.weights import chunk_weights_tpu
from mesanet_kernels.ops.gated_linear_attention import differentiable
from mesanet_kernels.tiles import tpu as tiles

CHUNK = tiles.CHUNK
# Supported key and value sizes. Below 64, most lanes would be idle; above 256, the states of four heads take over 1 MiB
# of VMEM.
SIZES = (64, 128, 192, 256)


def gated_linear_attention_pallas_tpu(chunk, *inputs):
    """Returns (o [B, T, H, V], final state [B, H, K, V]), in chunks of 128; the arguments are those of the api.

    Raises:
      NotImplementedError: the kernels cannot run this call.
    """
    require("gated_linear_attention", "pallas_tpu", unsupported_reason(chunk, *inputs))
    return differentiable.gated_linear_attention_from_kernels(KERNELS, *inputs)


def unsupported_reason(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay, *_):
    """Returns why this call is not supported, as the end of a sentence; empty if it is."""
    arrays = q_BTHK, k_BTHK, v_BTHV
    reasons = {
        "needs one decay per head, not one per key channel": log_decay.ndim == 4,
        "needs q, k and v in bfloat16": any(x.dtype != jnp.bfloat16 for x in arrays),
        f"needs key and value sizes in {SIZES}": any(x.shape[-1] not in SIZES for x in arrays),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _backward(q_BTHK, k_BTHK, v_BTHV, weights, state_BHKV, do_BTHV, dfinal_BHKV):
    """Returns the cotangents, as `GatedLinearAttentionKernels.backward` does."""
    states_NBHKV = states_tpu(k_BTHK, v_BTHV, weights, state_BHKV)
    recurrence = RecurrenceInputsTpu(v_BTHV, do_BTHV, states_NBHKV, dfinal_BHKV)
    found = gradients_tpu(q_BTHK, k_BTHK, weights, (recurrence,), queries=True)
    return *found.dq_BTHK, found.dk_BTHK, *found.dv_BTHV, found.dweights, *found.dinitial_BHKV


KERNELS = differentiable.GatedLinearAttentionKernels(CHUNK, chunk_weights_tpu, forward_tpu, _backward)
