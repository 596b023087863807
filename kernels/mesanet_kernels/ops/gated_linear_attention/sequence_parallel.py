"""What a span of tokens does to the state of gated linear attention (sequence.py).

B batch, T time, H heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.sequence_parallel import Memory, decayed, log_remains


def summarise(q_BTHK, k_BTHK, v_BTHV, log_decay, beta_BTH, segment_ids_BT):
    """The log of what remains of a state [B, H, 1 or K], and what the span writes [B, H, K, V]."""
    del q_BTHK
    log_decay_BTHK = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    until_BTHK, remains_BHK = log_remains(log_decay_BTHK, segment_ids_BT)
    leaving_BTHK = (jnp.exp(until_BTHK) * beta_BTH[..., None] * k_BTHK).astype(k_BTHK.dtype)
    return remains_BHK, product("bthk,bthv->bhkv", leaving_BTHK, v_BTHV, log_decay.dtype)


MEMORY = Memory(summarise, decayed)
