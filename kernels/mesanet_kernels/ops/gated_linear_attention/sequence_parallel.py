"""How a shard of tokens changes the state of gated linear attention (docs/mesa.md, "Several devices").

B batch, T time, H heads, K key size, V value size.
"""

import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.sequence_parallel import Memory, decayed, log_remains


def summarise(q_BTHK, k_BTHK, v_BTHV, log_decay, beta_BTH, segment_ids_BT):
    """Returns the log decay of an entering state [B, H, 1 or K], and the state after the shard if it starts at 0."""
    del q_BTHK
    log_decay_BTHK = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    until_BTHK, remains_BHK = log_remains(log_decay_BTHK, segment_ids_BT)
    leaving_BTHK = (jnp.exp(until_BTHK) * beta_BTH[..., None] * k_BTHK).astype(k_BTHK.dtype)
    return remains_BHK, product("bthk,bthv->bhkv", leaving_BTHK, v_BTHV, log_decay.dtype)


MEMORY = Memory(summarise, decayed)
