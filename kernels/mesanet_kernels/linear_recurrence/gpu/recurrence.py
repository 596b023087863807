"""The Hopper kernels of a linear recurrence in terms of `ChunkWeights`, and the cotangents of these weights.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.linear_recurrence.gpu.gradients import RecurrenceGradientsGpu
from mesanet_kernels.linear_recurrence.gpu.states import states_gpu


def entering_states(k_BTHK, v_BTHV, weights: ChunkWeights, initial_BHKV, **precision):
    """Returns the states that enter each chunk and the last state, as `states_gpu` does.

    Args:
      k_BTHK, v_BTHV: bfloat16, T = N C.
      initial_BHKV: the state that enters the first chunk, float32.
      precision: `factors` and `stored` of `states_gpu`.
    """
    return states_gpu((k_BTHK,), (v_BTHV,), weights.leave_NBHC, weights.carry_NBH, initial_BHKV, **precision)


def leaving_state_cotangents(q_parts, do_parts, weights: ChunkWeights, dfinal_BHKV, **precision):
    """Returns the cotangents of the states that leave each chunk, and that of the initial state.

    Args:
      q_parts, do_parts: tuples of bfloat16 arrays [B, T, H, K] and [B, T, H, V], whose sums are the queries and the
        cotangents of the outputs.
      dfinal_BHKV: the cotangent of the state after the last chunk, float32.
      precision: `factors` and `stored` of `states_gpu`.
    """
    return states_gpu(
        q_parts, do_parts, weights.enter_NBHC, weights.carry_NBH, dfinal_BHKV, backwards=True, **precision
    )


def weight_cotangents(gradients: RecurrenceGradientsGpu) -> ChunkWeights:
    """Returns the cotangents of the `ChunkWeights`, adding those of `leave_NBHC` and `carry_NBH` to where these are."""
    return ChunkWeights(
        gradients.dintra_NBHCC.at[..., -1, :].add(gradients.dleave_NBHC),
        gradients.denter_NBHC.at[..., -1].add(jnp.sum(gradients.dcarry_NBHK, axis=-1)),
    )
