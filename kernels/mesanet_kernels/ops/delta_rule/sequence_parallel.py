"""How a shard of the sequence changes the state of the delta rule: S becomes A S + F, where A is a matrix [K, K].

One run with V + K values per token gives both. For F, the run starts from zeros and reads the values of the shard; for
A, it starts from the identity and reads values of zero.

B batch, T time, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import product
from mesanet_kernels.ops.delta_rule import xla


def summarise(
    chunk: int, q_BTHK, k_BTHK, v_BTHV, beta_BTH, log_decay_BTH, segment_ids_BT
) -> tuple[jax.Array, jax.Array]:
    """Returns A [B, H, K, K] and F [B, H, K, V]."""
    del q_BTHK
    batch, time, heads, key_size = k_BTHK.shape
    value_size, dtype = v_BTHV.shape[-1], log_decay_BTH.dtype
    zeros_BHKV = jnp.zeros((batch, heads, key_size, value_size), dtype)
    identity_BHKK = jnp.broadcast_to(jnp.eye(key_size, dtype=dtype), (batch, heads, key_size, key_size))
    values_BTHW = jnp.concatenate([v_BTHV, jnp.zeros(k_BTHK.shape, v_BTHV.dtype)], axis=-1)
    initial_BHKW = jnp.concatenate([zeros_BHKV, identity_BHKK], axis=-1)
    final_BHKW = xla.delta_rule_final_state(
        chunk, k_BTHK, values_BTHW, beta_BTH, log_decay_BTH, initial_BHKW, segment_ids_BT
    )
    return final_BHKW[..., value_size:], final_BHKW[..., :value_size]


def advance(summary: tuple[jax.Array, jax.Array], state_BHKV: jax.Array) -> jax.Array:
    """Returns the state after the shard, from the state before it."""
    transition_BHKK, written_BHKV = summary
    return product("bhkj,bhjv->bhkv", transition_BHKK, state_BHKV, state_BHKV.dtype) + written_BHKV
