"""Attention of one span of queries over the keys that it sees, its own and those of other devices (sequence.py).

B batch, T queries of a span, S keys seen.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.ops.attention import xla


def attention(options, axes, q_BTHK, k_BTJK, v_BTJV, segment_ids_BT):
    """A window that reaches back no further than one span needs the end of that one alone; else all keys are gathered."""
    span = q_BTHK.shape[1]
    if options.window is not None and options.window <= span:
        reach = max(options.window - 1, 1)
        k_BSJK, v_BSJV, segment_ids_BS = (_with_previous(x, reach, axes) for x in (k_BTJK, v_BTJV, segment_ids_BT))
        # Before the first span there is nothing: a document of its own.
        nothing_S = (jax.lax.axis_index(axes) == 0) & (jnp.arange(reach + span) < reach)
        segment_ids_BS = jnp.where(nothing_S, segment_ids_BT[:, :1] - 1, segment_ids_BS)
        start = reach
    else:
        gather = lambda x_BT: jax.lax.all_gather(x_BT, axes, axis=1, tiled=True)
        k_BSJK, v_BSJV, segment_ids_BS = (gather(x) for x in (k_BTJK, v_BTJV, segment_ids_BT))
        start = span * jax.lax.axis_index(axes)
    return xla.attend(options, q_BTHK, k_BSJK, v_BSJV, segment_ids_BT, segment_ids_BS, start=start)


def _with_previous(x_BT, reach, axes):
    """The last `reach` tokens of the span before, zeros before the first, and this span."""
    spans = jax.lax.axis_size(axes)
    end_BT = jax.lax.ppermute(x_BT[:, x_BT.shape[1] - reach :], axes, [(i, i + 1) for i in range(spans - 1)])
    return jnp.concatenate([end_BT, x_BT], axis=1)
