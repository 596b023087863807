"""Decoding: prefill in chunks, then one compiled step a token, with a state that the model defines.

B sequences decoded together, T tokens of a chunk, V the true vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_jax.errors import UserError
from mesanet_jax.models import Model


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from logits. Temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(f"temperature={self.temperature}: must be finite and at least 0")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k}: must be at least 0, which keeps every token")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p={self.top_p}: must be above 0 and at most 1")

    def draw(self, logits_BV, key):
        """Token ids [B]."""
        if self.temperature == 0.0:
            return jnp.argmax(logits_BV, axis=-1)
        logits_BV = truncate(logits_BV / self.temperature, top_k=self.top_k, top_p=self.top_p)
        return jax.random.categorical(key, logits_BV)


def truncate(logits_BV, *, top_k: int, top_p: float):
    """-inf for all but the `top_k` likeliest tokens, then for all but the fewest of them with probability `top_p`.

    Tokens that tie with the last one kept are kept too. Nucleus sampling: arXiv 1904.09751.
    """
    if 0 < top_k < logits_BV.shape[-1]:
        smallest_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    if top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # 0 at the likeliest, so one token always stays
        smallest_B1 = jnp.min(sorted_BV, axis=-1, keepdims=True, where=before_BV < top_p, initial=jnp.inf)
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    return logits_BV


def chunk_sizes(length: int, chunk: int) -> list[int]:
    """Full chunks, then falling powers of two: prompts of every length share 1 + log2(chunk) compiled programs."""
    sizes, rest = [chunk] * (length // chunk), length % chunk
    return sizes + [1 << bit for bit in reversed(range(rest.bit_length())) if rest >> bit & 1]


class Sampler:
    """One model's compiled decoding functions.

    `prefill` may be followed by any number of `tokens`: they leave the prefilled logits and state as they are.
    """

    def __init__(self, model: Model):
        def extend(params, tokens_BT, state):
            logits_BTV, state = model.extend(params, tokens_BT, state)
            return logits_BTV[:, -1], state

        def step(params, logits_BV, state, key, index, sampling):
            token_B = sampling.draw(logits_BV, jax.random.fold_in(key, index))
            return token_B, *model.decode_step(params, token_B, state)

        def empty(params, max_length):
            return model.init_state(params, 1, max_length=max_length)

        self.model = model
        self._empty = jax.jit(empty, static_argnames="max_length")
        self._extend = jax.jit(extend, donate_argnames="state")
        self._step = jax.jit(step, static_argnames="sampling", donate_argnames=("logits_BV", "state"))

    def prefill(self, params, prompt: Sequence[int], *, max_length: int, chunk: int):
        """Reads a prompt of at least one token: (logits [1,V] after it, state for `max_length` tokens in all)."""
        state = self._empty(params, max_length=max_length)
        prompt_T, position, logits_BV = np.asarray(prompt, np.int32), 0, None
        for size in chunk_sizes(len(prompt), chunk):
            logits_BV, state = self._extend(params, prompt_T[None, position : position + size], state)
            position += size
        return logits_BV, state

    def tokens(self, params, logits_BV, state, *, key, sampling: Sampling) -> Iterator[int]:
        """Draws tokens after a prefill, without end; token i of a key is drawn with fold_in(key, i)."""
        logits_BV, state = jax.tree.map(jnp.copy, (logits_BV, state))  # since the step consumes (donates) its own
        for index in itertools.count():
            token_B, logits_BV, state = self._step(params, logits_BV, state, key, index, sampling)
            yield int(token_B[0])


def state_bytes(state) -> int:
    """Bytes of a decoding state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


class StreamDecoder:
    """Text as its tokens come: only what later tokens cannot change.

    A token may end inside a UTF-8 character, which decodes to U+FFFD until the rest has come: such an end is held
    back. All ids are decoded each time, since tokenizers join pieces by their neighbours.
    """

    def __init__(self, decode: Callable[[list[int]], str], ids: Sequence[int] = ()):
        self._decode, self._ids = decode, list(ids)
        self._printed = len(decode(self._ids))  # the given ids (a prompt) are context, not output

    def push(self, token: int) -> str:
        """The text that became certain with this token; often empty."""
        self._ids.append(token)
        return self._emit(self._stable())

    def finish(self) -> str:
        """What was held back, as it stands."""
        return self._emit(self._decode(self._ids))

    def _stable(self) -> str:
        return self._decode(self._ids).rstrip("\ufffd")

    def _emit(self, text: str) -> str:
        new, self._printed = text[self._printed :], max(self._printed, len(text))
        return new
