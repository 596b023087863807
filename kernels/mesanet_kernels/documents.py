"""The places where documents start inside packed rows.

B batch, T time.
"""

import jax
import jax.numpy as jnp


def document_starts(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns bool [B, T], true at the first token of each document; the first token of a row is always one."""
    return jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1] - 1) != 0


def state_resets(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns bool [B, T], true where a recurrent state must be set to zero before a token is read.

    These are the document starts inside a row. The first token of a row is never one, because the initial state of a
    row belongs to the document of its first token.
    """
    return jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0
