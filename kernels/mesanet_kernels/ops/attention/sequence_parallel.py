"""Attention of one shard of the queries over the keys that they see, on their own and on other devices.

B batch, T queries of a shard, S keys that they may see; H query heads, J key heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.ops.attention.xla import AttentionOptions, attend


def attend_shard(options: AttentionOptions, axes: tuple[str, ...], q_BTHK, k_BTJK, v_BTJV, segment_ids_BT) -> jax.Array:
    """Computes attention for this device's shard of the sequence, inside `map_shards` over `axes`.

    A window that reaches back into the previous shard only needs the end of that shard. Otherwise all keys and values
    are gathered.
    """
    shard = q_BTHK.shape[1]
    if options.window is not None and options.window <= shard:
        reach = max(options.window - 1, 1)
        k_BSJK, v_BSJV, segment_ids_BS = (
            _prepend_previous_shard(x, reach, axes) for x in (k_BTJK, v_BTJV, segment_ids_BT)
        )
        # The first shard has no predecessor: its zeros are marked as another document, so that no query sees them.
        missing_S = (jax.lax.axis_index(axes) == 0) & (jnp.arange(reach + shard) < reach)
        segment_ids_BS = jnp.where(missing_S, segment_ids_BT[:, :1] - 1, segment_ids_BS)
        start = reach
    else:
        k_BSJK, v_BSJV, segment_ids_BS = (
            jax.lax.all_gather(x, axes, axis=1, tiled=True) for x in (k_BTJK, v_BTJV, segment_ids_BT)
        )
        start = shard * jax.lax.axis_index(axes)
    return attend(options, q_BTHK, k_BSJK, v_BSJV, segment_ids_BT, segment_ids_BS, start=start)


def _prepend_previous_shard(x_BT: jax.Array, reach: int, axes: tuple[str, ...]) -> jax.Array:
    """Returns this shard after the last `reach` tokens of the previous shard, which are zeros for the first shard."""
    shards = jax.lax.axis_size(axes)
    end_BT = jax.lax.ppermute(x_BT[:, x_BT.shape[1] - reach :], axes, [(i, i + 1) for i in range(shards - 1)])
    return jnp.concatenate([end_BT, x_BT], axis=1)
