"""The plainest form of a recurrence: one token after the other. Every reference stands on it.

B batch, T time.
"""

import jax
import jax.numpy as jnp


def scan_tokens(step, state, inputs, segment_ids_BT):
    """Runs `state, output = step(state, token)` over axis 1 of `inputs`, with a zero state at each new document.

    The initial state belongs to the first token's document.

    Returns:
      outputs stacked on axis 1, and the state after the last token.
    """
    starts_BT = jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1]) != 0

    def advance(state, token):
        starts_B, *token = token
        state = jax.tree.map(lambda s: jnp.where(_expand(starts_B, s.ndim), 0, s), state)
        return step(state, token)

    by_time = [jnp.moveaxis(x, 1, 0) for x in (starts_BT, *inputs)]
    state, outputs = jax.lax.scan(advance, state, by_time)
    return jnp.moveaxis(outputs, 0, 1), state


def _expand(x_B, ndim):
    return x_B.reshape(x_B.shape + (1,) * (ndim - 1))
