"""Where documents start inside packed rows.

B batch, T time.
"""

import jax
import jax.numpy as jnp


def document_starts(segment_ids_BT: jax.Array) -> jax.Array:
    """Returns bool [B, T], true at the first token of each document; the first token of a row always is one."""
    return jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1] - 1) != 0
