"""How a shard of tokens changes the state (C, n, m) of an mLSTM (docs/mesa.md, "Several devices").

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.mlstm.reference import STABILISER_FLOOR
from mesanet_kernels.ops.mlstm.xla import lower_bounds
from mesanet_kernels.sequence_parallel import Memory, log_remains


def summarise(q_BTHK, k_BTHK, v_BTHV, input_gate_BTH, forget_gate_BTH, segment_ids_BT):
    """Returns the log decay of an entering state [B, H], and the (C, n, m) after the shard if C and n start at 0."""
    del q_BTHK
    log_forget_BTH = jax.nn.log_sigmoid(forget_gate_BTH)
    until_BTH, remains_BH = log_remains(log_forget_BTH, segment_ids_BT)
    m_BH = jnp.max(lower_bounds(input_gate_BTH, log_forget_BTH, segment_ids_BT) + until_BTH, axis=1)
    m_BH = jnp.maximum(m_BH, STABILISER_FLOOR)
    leaving_BTHK = jnp.exp(input_gate_BTH + until_BTH - m_BH[:, None])[..., None] * k_BTHK
    cell_BHKV = product("bthk,bthv->bhkv", leaving_BTHK.astype(k_BTHK.dtype), v_BTHV, m_BH.dtype)
    return remains_BH, (cell_BHKV, jnp.sum(leaving_BTHK, axis=1), m_BH)


def advance(summary, state):
    """Returns the (C, n, m) after the shard: what remains plus what was written, with the larger stabiliser."""
    remains_BH, (own_cell_BHKV, own_normaliser_BHK, own_m_BH) = summary
    cell_BHKV, normaliser_BHK, before_BH = state
    m_BH = jnp.maximum(own_m_BH, remains_BH + before_BH)
    carried_BH, own_BH = jnp.exp(remains_BH + before_BH - m_BH), jnp.exp(own_m_BH - m_BH)
    cell_BHKV = carried_BH[..., None, None] * cell_BHKV + own_BH[..., None, None] * own_cell_BHKV
    normaliser_BHK = carried_BH[..., None] * normaliser_BHK + own_BH[..., None] * own_normaliser_BHK
    return cell_BHKV, normaliser_BHK, m_BH


MEMORY = Memory(summarise, advance)
