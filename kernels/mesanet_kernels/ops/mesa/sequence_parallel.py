"""How a shard of tokens changes Mesa's two states: both are states of gated linear attention (docs/mesa.md,
"Several devices").

B batch, T time, H heads, K key size, V value size, W = K + V.
"""

import jax.numpy as jnp

from mesanet_kernels.ops.gated_linear_attention.sequence_parallel import summarise as summarise_state
from mesanet_kernels.sequence_parallel import Memory, decayed


def summarise(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, segment_ids_BT):
    """Returns the log decay of an entering state [B, H, 1], and the (h_kk, h_kv) after the shard if they start at 0."""
    del lam_HK
    # In the accumulation dtype, as in chunked.py: the solve needs precise states.
    k_BTHK, v_BTHV = (x.astype(log_decay_BTH.dtype) for x in (k_BTHK, v_BTHV))
    values_BTHW = jnp.concatenate([k_BTHK, v_BTHV], axis=-1)
    remains_BH1, written_BHKW = summarise_state(q_BTHK, k_BTHK, values_BTHW, log_decay_BTH, beta_BTH, segment_ids_BT)
    key_size = k_BTHK.shape[-1]
    return remains_BH1, (written_BHKW[..., :key_size], written_BHKW[..., key_size:])


MEMORY = Memory(summarise, decayed)
