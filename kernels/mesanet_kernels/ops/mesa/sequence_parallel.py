"""How a shard of the sequence changes the two states of Mesa, which are states of gated linear attention.

B batch, T time, H heads, K key size, V value size, W = K + V.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.ops.gated_linear_attention.sequence_parallel import summarise as summarise_state
from mesanet_kernels.sequence_parallel import ShardTransition, decay_and_add


def summarise(
    q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, segment_ids_BT
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """Returns (the log decay of the states over the shard [B, H, 1], what the shard writes to (h_kk, h_kv))."""
    del lam_HK
    # In float32, as in chunked.py: h_kk is the matrix of a linear system, whose solution magnifies rounding errors.
    k_BTHK, v_BTHV = (x.astype(log_decay_BTH.dtype) for x in (k_BTHK, v_BTHV))
    values_BTHW = jnp.concatenate([k_BTHK, v_BTHV], axis=-1)
    total_BH1, written_BHKW = summarise_state(q_BTHK, k_BTHK, values_BTHW, log_decay_BTH, beta_BTH, segment_ids_BT)
    key_size = k_BTHK.shape[-1]
    return total_BH1, (written_BHKW[..., :key_size], written_BHKW[..., key_size:])


SHARD_TRANSITION = ShardTransition(summarise, decay_and_add)
