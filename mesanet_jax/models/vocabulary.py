"""The vocabulary side of a model: tables with one row per token, logits, and the cross-entropy.

B batch, T time, D model width, V table rows (the vocabulary, padded so that it can be sharded).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.layers import Initializer, param
from mesanet_jax.models.interface import Batch
from mesanet_jax.schema import Config
from mesanet_kernels import softmax_cross_entropy


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """How many tokens there are, and how tables and logits treat them. It holds no parameters.

    Attributes:
      size: tokens of the tokenizer.
      rows: rows of each table, `size` rounded up. Padding rows have no loss, no probability and no gradient.
      softcap: c in c tanh(logits / c); None for no cap.
    """

    size: int
    rows: int
    softcap: float | None

    @classmethod
    def of(cls, model: Config) -> "Vocabulary":
        """The vocabulary of a `config.model`."""
        rows = math.ceil(model.vocab_size / model.vocab_multiple) * model.vocab_multiple
        return cls(size=model.vocab_size, rows=rows, softcap=model.logit_softcap)

    def table(self, width: int, init: Initializer, *, rngs: nnx.Rngs) -> nnx.Param:
        """A parameter [V, width], such as an embedding or a head."""
        return param(rngs, init, (self.rows, width), ("vocab", "embed"))

    def logits(self, hidden: jax.Array, head_VD: nnx.Param) -> jax.Array:
        """Soft-capped logits [..., size] in float32 for states [..., D]."""
        true_VD = head_VD[...][: self.size].astype(hidden.dtype)
        logits = jnp.einsum("...d,vd->...v", hidden, true_VD, preferred_element_type=jnp.float32)
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)

    def cross_entropy(self, hidden_BTD: jax.Array, head_VD: nnx.Param, batch: Batch) -> jax.Array:
        """The negative log-likelihood of each target in nats, times its weight: [B,T] float32."""
        return softmax_cross_entropy(
            hidden_BTD,
            head_VD[...],
            batch["targets"],
            softcap=self.softcap,
            weights=batch["weights"],
            vocab_size=self.size,
        )

    def padding_parameters(self, module: nnx.Module) -> int:
        """The number of parameters in padding rows, over all tables of a module."""
        variables = [variable for _, variable in nnx.to_flat_state(nnx.state(module))]
        tables = [math.prod(table.shape) for table in variables if "vocab" in table.axes]
        return sum(size // self.rows * (self.rows - self.size) for size in tables)
