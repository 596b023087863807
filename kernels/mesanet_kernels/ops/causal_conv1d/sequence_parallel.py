"""How a shard of the sequence changes the state of a convolution, its last inputs.

B batch, T time, D channels, W taps, X = W - 1 inputs in the state, of which L = min(T, X) come from the shard,
S = X + L.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.ops.causal_conv1d.xla import last_inputs
from mesanet_kernels.sequence_parallel import ShardTransition, where_per_row


def summarise(x_BTD, w_WD, bias_D, segment_ids_BT) -> tuple[jax.Array, jax.Array]:
    """Summarises the shard.

    Returns:
      (bool [B]: whether the whole shard is one document; the last inputs of its last document, [B, L, D]).
    """
    del bias_D
    batch, length, channels = x_BTD.shape
    kept = w_WD.shape[0] - 1
    last_BXD = last_inputs(x_BTD, jnp.zeros((batch, kept, channels), x_BTD.dtype), segment_ids_BT)
    return segment_ids_BT[:, 0] == segment_ids_BT[:, -1], last_BXD[:, max(kept - length, 0) :]


def advance(summary: tuple[jax.Array, jax.Array], tail_BXD: jax.Array) -> jax.Array:
    """Returns the last inputs after the shard, from those before it."""
    continues_B, last_BLD = summary
    known_BSD = jnp.concatenate([where_per_row(continues_B, tail_BXD, 0), last_BLD], axis=1)
    return known_BSD[:, last_BLD.shape[1] :]


SHARD_TRANSITION = ShardTransition(summarise, advance)
