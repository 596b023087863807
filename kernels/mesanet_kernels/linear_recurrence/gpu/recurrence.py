"""The three kernels as one chunked recurrence: from `ChunkWeights` to outputs and back to their cotangents.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.linear_recurrence.gpu.states import states_gpu


def entering_states(k_BTHK, v_BTHV, weights, initial_BHKV, **precision):
    """`states_gpu` that enter each chunk, and the last one."""
    leave_NBHC, carry_NBH = weights.intra_NBHCC[..., -1, :], weights.enter_NBHC[..., -1]
    return states_gpu((k_BTHK,), (v_BTHV,), leave_NBHC, carry_NBH, initial_BHKV, **precision)


def leaving_state_cotangents(q_parts, do_parts, weights, dfinal_BHKV, **precision):
    """Cotangents of the `states_gpu` that leave each chunk, and of the initial one."""
    enter_NBHC = weights.enter_NBHC
    return states_gpu(q_parts, do_parts, enter_NBHC, enter_NBHC[..., -1], dfinal_BHKV, backwards=True, **precision)


def weight_cotangents(gradients):
    """Of the `ChunkWeights` whose last rows are also what leaves a chunk."""
    return ChunkWeights(
        gradients.dintra_NBHCC.at[..., -1, :].add(gradients.dleave_NBHC),
        gradients.denter_NBHC.at[..., -1].add(jnp.sum(gradients.dcarry_NBHK, axis=-1)),
    )
