"""The scan over tokens that every reference implementation uses: a recurrence in its plainest form.

B batch, T time.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mesanet_kernels.documents import state_resets


def scan_tokens(
    update: Callable, state: Any, inputs: Sequence[jax.Array], segment_ids_BT: jax.Array
) -> tuple[jax.Array, Any]:
    """Runs `state, output = update(state, token)` for one token after the other; documents start from a zero state.

    Args:
      update: takes the state and a list with one array [B, ...] per input.
      state: a tree of arrays [B, ...]; belongs to the document of the first token.
      inputs: arrays [B, T, ...].
      segment_ids_BT: a number per token, non-decreasing, that differs between documents.

    Returns:
      (the outputs stacked on axis 1, the state after the last token).
    """
    starts_BT = state_resets(segment_ids_BT)

    def advance(state, token):
        """Resets the state of rows in which a document starts, then updates it."""
        starts_B, *token = token
        state = jax.tree.map(lambda s: jnp.where(_expand(starts_B, s.ndim), 0, s), state)
        return update(state, token)

    by_time = [jnp.moveaxis(x, 1, 0) for x in (starts_BT, *inputs)]
    state, outputs = jax.lax.scan(advance, state, by_time)
    return jnp.moveaxis(outputs, 0, 1), state


def _expand(x_B, ndim):
    """Returns x with trailing axes of size 1, `ndim` axes in all."""
    return x_B.reshape(x_B.shape + (1,) * (ndim - 1))
