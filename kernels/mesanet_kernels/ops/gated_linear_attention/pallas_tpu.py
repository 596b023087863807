"""Gated linear attention with a scalar decay on TPUs: kernels for the weights, the op and its gradients (tpu/).

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
SIZES = (64, 128, 192, 256)  # half of the lanes wastes the matrix unit, four states of 256 x 256 are 1 MiB of VMEM


def gated_linear_attention_pallas_tpu(chunk, *inputs):
    """As `api.gated_linear_attention`, in chunks of 128. Raises NotImplementedError for what the kernels lack."""
    require("gated_linear_attention", "pallas_tpu", unsupported_reason(chunk, *inputs))
    return differentiable.gated_linear_attention_from_kernels(KERNELS, *inputs)


def unsupported_reason(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay, *_):
    """Why the kernels cannot run this call; empty if they can."""
    arrays = q_BTHK, k_BTHK, v_BTHV
    reasons = {
        "has no decay a key channel": log_decay.ndim == 4,
        "needs q, k and v in bfloat16": any(x.dtype != jnp.bfloat16 for x in arrays),
        f"needs key and value sizes in {SIZES}": any(x.shape[-1] not in SIZES for x in arrays),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def _backward(q_BTHK, k_BTHK, v_BTHV, weights, state_BHKV, do_BTHV, dfinal_BHKV):
    memory = RecurrenceInputsTpu(v_BTHV, do_BTHV, states_tpu(k_BTHK, v_BTHV, weights, state_BHKV), dfinal_BHKV)
    found = gradients_tpu(q_BTHK, k_BTHK, weights, (memory,), queries=True)
    return *found.dq_BTHK, found.dk_BTHK, *found.dv_BTHV, found.dweights, *found.dinitial_BHKV


KERNELS = differentiable.GatedLinearAttentionKernels(CHUNK, chunk_weights_tpu, forward_tpu, _backward)
