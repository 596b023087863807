"""The gated delta rule in chunks and plain XLA, in the WY form (DeltaNet, arXiv 2406.06484; gated, arXiv 2412.06464).

A token writes what its key does not yet recall, w_t = beta_t (v_t - gamma_t S_{t-1}^T k_t). The state is then that of
gated linear attention with the values w, S_t = gamma_t S_{t-1} + k_t w_t^T. With S the state that enters the chunk, the
writes of a chunk solve a unit lower-triangular system:

    (I + L) w = beta (v - enter K S)        L[t, s] = beta_t decay(s, t) k_t.k_s  for s < t

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.delta_rule.triangular import unit_lower_inverse
from mesanet_kernels.recompute import recomputed


@recomputed
def delta_rule_xla(chunk, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV, segment_ids_BT):
    """Returns (o [B, T, H, V], final state [B, H, K, V]) with the arguments of `api.delta_rule`."""
    length, dtype = q_BTHK.shape[1], q_BTHK.dtype
    # Beta is not part of the weights: it is already part of the writes w.
    weights = chunks.chunk_weights(log_decay_BTH, jnp.ones_like(beta_BTH), segment_ids_BT, chunk=chunk)
    q_NBHCK, k_NBHCK, v_NBHCV, beta_NBHC = (chunks.to_chunks(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV, beta_BTH))
    states_NBHKV, w_NBHCV, final_BHKV = _states(k_NBHCK, v_NBHCV, beta_NBHC, weights, state_BHKV)
    o_NBHCV = chunks.read(q_NBHCK, k_NBHCK, w_NBHCV.astype(dtype), weights, states_NBHKV)
    return chunks.from_chunks(o_NBHCV, length).astype(v_BTHV.dtype), final_BHKV


@recomputed
def delta_rule_final_state(chunk, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, state_BHKV, segment_ids_BT):
    """Returns only the final state of `delta_rule_xla`, [B, H, K, V]."""
    weights = chunks.chunk_weights(log_decay_BTH, jnp.ones_like(beta_BTH), segment_ids_BT, chunk=chunk)
    k_NBHCK, v_NBHCV, beta_NBHC = (chunks.to_chunks(x, chunk) for x in (k_BTHK, v_BTHV, beta_BTH))
    return _states(k_NBHCK, v_NBHCV, beta_NBHC, weights, state_BHKV)[-1]


def _writes(k_NBHCK, v_NBHCV, beta_NBHC, weights):
    """Returns U [N, B, H, C, V] and W [N, B, H, C, K] in the dtype of the gates.

    The writes of a chunk are w = U - W S, where S is the state that enters it.
    """
    dtype = beta_NBHC.dtype
    overlap_NBHCC = chunks.product("nbhtk,nbhsk->nbhts", k_NBHCK, k_NBHCK, dtype)
    system_NBHCC = beta_NBHC[..., None] * overlap_NBHCC * jnp.tril(weights.intra_NBHCC, -1)
    inverse_NBHCC = unit_lower_inverse(system_NBHCC)

    def solve(x_NBHCX):
        return chunks.product("nbhts,nbhsx->nbhtx", inverse_NBHCC, x_NBHCX, dtype)

    enter_NBHC = beta_NBHC * weights.enter_NBHC
    return solve(beta_NBHC[..., None] * v_NBHCV.astype(dtype)), solve(enter_NBHC[..., None] * k_NBHCK.astype(dtype))


def _states(k_NBHCK, v_NBHCV, beta_NBHC, weights, initial_BHKV):
    """Returns the states that enter each chunk [N, B, H, K, V], the writes [N, B, H, C, V], and the final state.

    Everything is in the dtype of the state. With a rounded W, the state would grow where a key repeats and nothing is
    forgotten.
    """
    dtype = initial_BHKV.dtype
    own_NBHCV, recall_NBHCK = _writes(k_NBHCK, v_NBHCV, beta_NBHC, weights)
    leave_NBHCK = k_NBHCK.astype(dtype) * weights.leave_NBHC[..., None]

    def carry_over(state_BHKV, inputs):
        leave_BHCK, own_BHCV, recall_BHCK, carry_BH = inputs
        w_BHCV = own_BHCV - chunks.product("bhck,bhkv->bhcv", recall_BHCK, state_BHKV, dtype)
        update_BHKV = chunks.product("bhck,bhcv->bhkv", leave_BHCK, w_BHCV, dtype)
        return carry_BH[..., None, None] * state_BHKV + update_BHKV, (state_BHKV, w_BHCV)

    inputs = leave_NBHCK, own_NBHCV, recall_NBHCK, weights.carry_NBH
    final_BHKV, (states_NBHKV, w_NBHCV) = jax.lax.scan(carry_over, initial_BHKV, inputs)
    return states_NBHKV, w_NBHCV, final_BHKV
