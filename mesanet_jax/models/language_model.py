"""The language model of MesaNet (arXiv 2506.05233, appendices E and G) around any mixers.

A scaled embedding, blocks in depth, a final norm and a soft-capped head.

B batch, T time, D model width, V vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import RMSNorm
from mesanet_jax.mesh import constrain
from mesanet_jax.mixers import MIXERS
from mesanet_jax.models import fields
from mesanet_jax.models.block import ACTIVATION, LOOKED_UP, Block, Group
from mesanet_jax.models.interface import Batch, LayerStats
from mesanet_jax.models.stack import Maker, Pair, blocks_flops, init_states, make_blocks, scan, stats_by_layer
from mesanet_jax.models.vocabulary import Vocabulary
from mesanet_jax.schema import Config, Field


def table_init(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
    """Fan-in initialisation of the embedding and the head: standard deviation 1/sqrt(D) (appendix G)."""
    return jax.random.normal(key, shape, dtype) / jnp.sqrt(shape[-1]).astype(dtype)


class LanguageModel(nnx.Module):
    """The model kind `language_model`: blocks of one mixer and one SwiGLU network (a `Decoder`)."""

    MIXERS = MIXERS
    FIELDS = (
        fields.VOCABULARY
        | fields.SIZES
        | fields.COMPUTATION
        | {
            "mlp_ratio": Field(3.0, "width of each of SwiGLU's two branches, divided by dim", above=0.0, fixed=True),
            "logit_softcap": Field(30.0, "c in c tanh(logits / c); none: no cap", kind=float, above=0.0, fixed=True),
            "tie_embeddings": Field(True, "use the transposed embedding as the head", fixed=True),
            "residual_init_scale": Field(
                2.0,
                "initial variance of weights into the residual stream, times layers times fan-in",
                above=0.0,
                fixed=True,
            ),
        }
    )

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError for a combination of fields that no language model can have."""
        fields.check_layers(model)

    def __init__(self, model: Config, *, makers: Sequence[Maker] | None = None, rngs: nnx.Rngs):
        """`makers` are one period of the blocks; None for the blocks that `model.pattern` names."""
        if makers is None:
            makers = [partial(Block, model, mixer) for mixer in model.pattern]
        self.vocabulary = Vocabulary.of(model)
        self.embedding = self.vocabulary.table(model.dim, table_init, rngs=rngs)
        self.head = None if model.tie_embeddings else self.vocabulary.table(model.dim, table_init, rngs=rngs)
        self.groups, self.tail = make_blocks(makers, model.layers, rngs=rngs)
        self.final_norm = RMSNorm(model.dim, rngs=rngs, eps=model.norm_eps)
        self.remat, self.looped = model.remat, model.scan_layers
        self.resets, self.dtype = model.reset_at_documents, jnp.dtype(model.compute_dtype)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """The stream before the first block: embeddings times sqrt(D), which have unit variance (appendix G)."""
        scale = self.embedding.shape[-1] ** 0.5
        return self.embedding[...].astype(self.dtype)[tokens] * jnp.asarray(scale, self.dtype)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Soft-capped float32 logits over the true vocabulary."""
        return self.vocabulary.logits(hidden, self._head())

    def _head(self) -> nnx.Param:
        return self.embedding if self.head is None else self.head

    # ---- whole rows

    def hidden(self, tokens_BT: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """The normed stream before the head, [B,T,D]."""
        x_BTD, _ = self._run(lambda group, *args: (group(*args), None), tokens_BT, segment_ids_BT)
        return self.final_norm(x_BTD)

    def _run(self, call: Callable, tokens_BT, segment_ids_BT) -> tuple[jax.Array, Pair]:
        """The stream after all blocks, and the pair of what else `call(group, x, segment_ids)` returns."""
        if not self.resets:
            segment_ids_BT = jnp.zeros_like(segment_ids_BT)
        x_BTD = constrain(constrain(self.embed(tokens_BT), LOOKED_UP), ACTIVATION)

        def run(group, x_BTD, _):
            return call(group, x_BTD, segment_ids_BT)

        return scan(self, run, x_BTD, policy=self.remat, looped=self.looped)

    def loss(self, batch: Batch) -> jax.Array:
        """The negative log-likelihood of each target in nats, times its weight: [B,T] float32."""
        return self.vocabulary.cross_entropy(self.hidden(batch["inputs"], batch["segment_ids"]), self._head(), batch)

    def objective(self, batch: Batch, share: jax.Array | float) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The loss, which has no further terms."""
        return self.loss(batch), {}

    def scores(self, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """The loss alone: there is one way to compute the model."""
        return self.loss(batch), {}, {}

    def layer_stats(self, batch: Batch) -> LayerStats:
        """The statistics of the mixers on a batch, by name and layer."""
        _, stats = self._run(Group.with_stats, batch["inputs"], batch["segment_ids"])
        return stats_by_layer(self, stats)

    # ---- decoding

    def init_state(self, batch: int, *, max_length: int) -> Pair:
        """The decoding state of an empty past: the pair of the blocks' states."""
        return init_states(self, lambda group: group.init_state(batch, max_length=max_length, dtype=self.dtype))

    def extend(self, tokens_BT: jax.Array, state: Pair) -> tuple[jax.Array, Pair]:
        """Reads T further tokens of one document: (logits [B,T,V] float32, state)."""
        return self._decode(Group.extend, tokens_BT, state)

    def decode_step(self, tokens_B: jax.Array, state: Pair) -> tuple[jax.Array, Pair]:
        """Reads one further token: (logits [B,V] float32, state)."""
        return self._decode(Group.decode_step, tokens_B, state)

    def _decode(self, call: Callable, tokens, state: Pair) -> tuple[jax.Array, Pair]:
        x, state = scan(self, call, self.embed(tokens), state)
        return self.logits(self.final_norm(x)), state

    # ---- sizes

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`: the head is included, the embedding look-up is not counted."""
        return blocks_flops(self, seq_len) + products(2 * self.vocabulary.size * self.embedding.shape[-1])

    def padding_parameters(self) -> int:
        """The number of parameters in table rows that only pad the vocabulary."""
        return self.vocabulary.padding_parameters(self)
