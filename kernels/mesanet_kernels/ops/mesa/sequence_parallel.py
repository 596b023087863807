"""What a span of tokens does to Mesa's two states (sequence.py): both are gated linear attention's.

B batch, T time, H heads, K key size, V value size, W = K + V.
"""

import jax.numpy as jnp

from mesanet_kernels.ops.gated_linear_attention.sequence_parallel import summarise as summarise_state
from mesanet_kernels.sequence_parallel import Memory, decayed


def summarise(q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, segment_ids_BT):
    """The log of what remains of a state [B, H, 1], and what the span writes to (h_kk, h_kv)."""
    del lam_HK
    # In float32, as in chunked.py: what is read is solved for.
    k_BTHK, v_BTHV = (x.astype(log_decay_BTH.dtype) for x in (k_BTHK, v_BTHV))
    values_BTHW = jnp.concatenate([k_BTHK, v_BTHV], axis=-1)
    remains_BH1, written_BHKW = summarise_state(q_BTHK, k_BTHK, values_BTHW, log_decay_BTH, beta_BTH, segment_ids_BT)
    key_size = k_BTHK.shape[-1]
    return remains_BH1, (written_BHKW[..., :key_size], written_BHKW[..., key_size:])


MEMORY = Memory(summarise, decayed)
