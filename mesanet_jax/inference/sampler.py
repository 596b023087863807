"""The decoding engine: prefill in chunks, then one compiled decoding step per token, with the model's own state.

B sequences decoded together, T tokens of a chunk, V the true vocabulary.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_jax.inference.sampling import Sampling
from mesanet_jax.models import Model, Params


class Sampler:
    """One model's compiled decoding functions.

    `tokens` may be called any number of times after one `prefill`: it leaves the prefilled logits and state unchanged.
    """

    def __init__(self, model: Model):
        def extend(params, tokens_BT, state):
            logits_BTV, state = model.extend(params, tokens_BT, state)
            return logits_BTV[:, -1], state

        def decode_step(params, logits_BV, state, key, index, sampling):
            token_B = sampling.draw(logits_BV, jax.random.fold_in(key, index))
            return token_B, *model.decode_step(params, token_B, state)

        def init_state(params, max_length):
            return model.init_state(params, 1, max_length=max_length)

        self.model = model
        self._init_state = jax.jit(init_state, static_argnames="max_length")
        self._extend = jax.jit(extend, donate_argnames="state")
        self._decode_step = jax.jit(decode_step, static_argnames="sampling", donate_argnames=("logits_BV", "state"))

    def prefill(self, params: Params, prompt: Sequence[int], *, max_length: int, chunk: int) -> tuple[jax.Array, Any]:
        """Reads a prompt: (logits [1,V] after it, state).

        Args:
          prompt: token ids.
          max_length: the largest number of tokens that the state must hold, the prompt included.
          chunk: the number of prompt tokens that one call reads.

        Raises:
          ValueError: if the prompt is empty.
        """
        if not len(prompt):
            raise ValueError("the prompt is empty; it needs at least one token")
        state = self._init_state(params, max_length=max_length)
        prompt_T = np.asarray(prompt, np.int32)
        logits_BV: Any = None
        position = 0
        for size in chunk_sizes(len(prompt), chunk):
            logits_BV, state = self._extend(params, prompt_T[None, position : position + size], state)
            position += size
        return logits_BV, state

    def tokens(
        self, params: Params, logits_BV: jax.Array, state: Any, *, key: jax.Array, sampling: Sampling
    ) -> Iterator[int]:
        """Draws tokens after a prefill, without end. Token i is drawn with the key `fold_in(key, i)`."""
        logits_BV, state = jax.tree.map(jnp.copy, (logits_BV, state))  # the decoding step donates its arguments
        for index in itertools.count():
            token_B, logits_BV, state = self._decode_step(params, logits_BV, state, key, index, sampling)
            yield int(token_B[0])


def chunk_sizes(length: int, chunk: int) -> list[int]:
    """Splits a prompt into full chunks and falling powers of two.

    Prompts of all lengths then share at most 1 + log2(chunk) compiled programs.
    """
    full, rest = divmod(length, chunk)
    powers = [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]
    return [chunk] * full + powers


def state_bytes(state: Any) -> int:
    """The size of a decoding state in bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
