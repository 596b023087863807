"""How a shard of the sequence changes the state of an mLSTM; C, n and m are those of `api.mlstm`.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.mlstm.reference import STABILISER_FLOOR
from mesanet_kernels.ops.mlstm.xla import lower_bounds
from mesanet_kernels.sequence_parallel import ShardTransition, remaining_log_decays


def summarise(
    q_BTHK, k_BTHK, v_BTHV, input_gate_BTH, forget_gate_BTH, segment_ids_BT
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Returns (the log decay of the state over the shard [B, H], the (C, n, m) of the shard from a zero state)."""
    del q_BTHK
    log_forget_BTH = jax.nn.log_sigmoid(forget_gate_BTH)
    until_BTH, remains_BH = remaining_log_decays(log_forget_BTH, segment_ids_BT)
    m_BH = jnp.max(lower_bounds(input_gate_BTH, log_forget_BTH, segment_ids_BT) + until_BTH, axis=1)
    m_BH = jnp.maximum(m_BH, STABILISER_FLOOR)
    leaving_BTHK = jnp.exp(input_gate_BTH + until_BTH - m_BH[:, None])[..., None] * k_BTHK
    cell_BHKV = product("bthk,bthv->bhkv", leaving_BTHK.astype(k_BTHK.dtype), v_BTHV, m_BH.dtype)
    return remains_BH, (cell_BHKV, jnp.sum(leaving_BTHK, axis=1), m_BH)


def advance(summary, state) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds the entering state and what the shard writes, both rescaled to the larger of their stabilisers."""
    remains_BH, (own_cell_BHKV, own_normaliser_BHK, own_m_BH) = summary
    cell_BHKV, normaliser_BHK, before_BH = state
    m_BH = jnp.maximum(own_m_BH, remains_BH + before_BH)
    carried_BH, own_BH = jnp.exp(remains_BH + before_BH - m_BH), jnp.exp(own_m_BH - m_BH)
    cell_BHKV = carried_BH[..., None, None] * cell_BHKV + own_BH[..., None, None] * own_cell_BHKV
    normaliser_BHK = carried_BH[..., None] * normaliser_BHK + own_BH[..., None] * own_normaliser_BHK
    return cell_BHKV, normaliser_BHK, m_BH


SHARD_TRANSITION = ShardTransition(summarise, advance)
