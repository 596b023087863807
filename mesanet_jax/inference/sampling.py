"""How the next token is drawn from logits.

B sequences, V the true vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp

from mesanet_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """A way to draw tokens. Temperature 0 is greedy; top_k=0 and top_p=1 keep every token.

    Raises:
      UserError: for a value out of range.
    """

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

    def draw(self, logits_BV: jax.Array, key: jax.Array) -> jax.Array:
        """Draws one token id for each sequence, [B]."""
        if self.temperature == 0.0:
            return jnp.argmax(logits_BV, axis=-1)
        logits_BV = truncate(logits_BV / self.temperature, top_k=self.top_k, top_p=self.top_p)
        return jax.random.categorical(key, logits_BV)


def truncate(logits_BV: jax.Array, *, top_k: int, top_p: float) -> jax.Array:
    """Sets logits to -inf except those of the most likely tokens.

    The `top_k` most likely tokens are kept, and of these the fewest whose probabilities sum to at least `top_p`
    (nucleus sampling, arXiv 1904.09751). Tokens that tie with the least likely one kept are kept too.
    """
    if 0 < top_k < logits_BV.shape[-1]:
        smallest_B1 = jax.lax.top_k(logits_BV, top_k)[0][:, -1:]
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    if top_p < 1.0:
        sorted_BV = -jnp.sort(-logits_BV, axis=-1)
        probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
        before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV  # 0 at the most likely token, so that one is always kept
        smallest_B1 = jnp.min(sorted_BV, axis=-1, keepdims=True, where=before_BV < top_p, initial=jnp.inf)
        logits_BV = jnp.where(logits_BV >= smallest_B1, logits_BV, -jnp.inf)
    return logits_BV
