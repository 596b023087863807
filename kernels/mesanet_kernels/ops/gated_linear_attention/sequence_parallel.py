"""How a shard of the sequence changes the state of gated linear attention.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.sequence_parallel import ShardTransition, decay_and_add, remaining_log_decays


def summarise(q_BTHK, k_BTHK, v_BTHV, log_decay, beta_BTH, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Returns (the log decay of the state over the shard [B, H, 1 or K], what the shard writes [B, H, K, V])."""
    del q_BTHK
    log_decay_BTHK = log_decay[..., None] if log_decay.ndim == 3 else log_decay
    until_BTHK, total_BHK = remaining_log_decays(log_decay_BTHK, segment_ids_BT)
    leaving_BTHK = (jnp.exp(until_BTHK) * beta_BTH[..., None] * k_BTHK).astype(k_BTHK.dtype)
    return total_BHK, product("bthk,bthv->bhkv", leaving_BTHK, v_BTHV, log_decay.dtype)


SHARD_TRANSITION = ShardTransition(summarise, decay_and_add)
