"""Maglev (arXiv 2608.02870): a decoder P that reads its own memory through keys and values, trained in parallel.

    m' = Q(x)    m = P(x, shift(m'))    loss = cross-entropy(head m) + lambda mean_t ||m_t - m'_t|| / sqrt(D)

The prefiller Q is a causal Transformer without a memory. At inference it is dropped, and P reads its own m. Whether the
published scores are those of P alone is not known, so both losses are always reported (`scores`): P alone is "deployed",
P after Q "lifted".

B batch, T time, D model width.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops
from mesanet_jax.layers import param
from mesanet_jax.models.memory import MemoryModel
from mesanet_jax.models.nanochat import EMBEDDING_INIT, Scales
from mesanet_jax.models.stack import Stack
from mesanet_jax.schema import Field

# ||m - m'|| / sqrt(D) of a difference, [B,T,D] float32. The root's derivative at 0 is infinite, and m = m' there exactly
# at the first token of a fresh shared model: the 1e-12 is what keeps step 0 free of NaN.
NORMS = {
    "l2": lambda x_BTD: jnp.sqrt((jnp.sum(jnp.square(x_BTD), axis=-1) + 1e-12) / x_BTD.shape[-1]),
    "squared": lambda x_BTD: jnp.mean(jnp.square(x_BTD), axis=-1),
}
# What of (m, m') the consistency term moves. The target is what P is drawn to, m'.
STOPS = {
    "none": lambda m, target: (m, target),
    "target": lambda m, target: (m, jax.lax.stop_gradient(target)),
    "both": lambda m, target: (jax.lax.stop_gradient(m), jax.lax.stop_gradient(target)),
}


class Prefiller(nnx.Module):
    """What Q does not share with P: its residual scalars; of separate stacks its blocks, and an embedding if wanted."""

    def __init__(self, model, makers, *, rngs: nnx.Rngs):
        self.scales = Scales(model.layers, rngs=rngs)
        self.stack = Stack(makers, model.layers, rngs=rngs) if model.sharing == "separate" else None
        own = model.sharing == "separate" and model.prefiller_embedding
        padded = -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
        self.embedding = param(rngs, EMBEDDING_INIT, (padded, model.dim), ("vocab", "embed")) if own else None


class Maglev(MemoryModel):
    """P, which is the model that decodes, and Q. What the paper does not state is a field; defaults are its likeliest reading."""

    FIELDS = MemoryModel.FIELDS | {
        "prefiller_pattern": Field(("sliding", "attention"), "layers of Q, as `pattern` is those of P", fixed=True),
        "sharing": Field("shared", "P and Q have the same blocks but for residual scalars, or stacks of their own", choices=("shared", "separate"), fixed=True),
        "prefiller_embedding": Field(False, "separate: Q has an embedding of its own", fixed=True),
        "consistency_weight": Field(0.1, "lambda", at_least=0.0, fixed=True),
        "consistency_norm": Field("l2", "of m - m': its length over sqrt(dim), or the mean square", choices=tuple(NORMS), fixed=True),
        "stop_gradient": Field("none", "in the consistency term: of nothing, of m', or of both, which only measures it", choices=tuple(STOPS), fixed=True),
        "detach_memory": Field(False, "P's cross-entropy does not reach Q, which then learns from the consistency alone", fixed=True),
        "prefiller_loss_weight": Field(0.0, "weight of a cross-entropy of Q's own, by P's head", at_least=0.0, fixed=True),
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        MemoryModel.check(model)
        for name in model.prefiller_pattern:
            if name not in Maglev.MIXERS:
                raise UserError(
                    f"config.model.prefiller_pattern: no layer {name!r}; choose from {', '.join(sorted(Maglev.MIXERS))}"
                )
        if not model.prefiller_pattern:
            raise UserError("config.model.prefiller_pattern: names no layer")
        if model.prefiller_embedding and model.sharing == "shared":
            raise UserError("config.model.prefiller_embedding=true: needs config.model.sharing=separate")

    @classmethod
    def patterns(cls, model):
        return (model.pattern, model.prefiller_pattern)

    def __init__(self, model, *, rngs: nnx.Rngs):
        super().__init__(model, rngs=rngs)
        self.prefiller = Prefiller(model, self.block_makers(model, injected=False), rngs=rngs)
        self.prefiller_windows = self.windows(model, model.prefiller_pattern)
        self.weight, self.norm = model.consistency_weight, model.consistency_norm
        self.stop_gradient, self.detach = model.stop_gradient, model.detach_memory
        self.prefiller_weight = model.prefiller_loss_weight

    def _two_passes(self, batch):
        """(m', the memory of Q; P's final states; m, the memory that P writes)."""
        tokens_BT, segment_ids_BT = batch["inputs"], batch["segment_ids"]
        x0_BTD, context = self._rows(tokens_BT, segment_ids_BT)
        own, stack = self.prefiller.embedding, self.prefiller.stack
        prefilled_BTD = x0_BTD if own is None else self._rows(tokens_BT, segment_ids_BT, own[...])[0]
        target_BTD, _ = self._pass(
            self if stack is None else stack, self.prefiller.scales, self.prefiller_windows, prefilled_BTD, context
        )
        read_BTD = self._shift(jax.lax.stop_gradient(target_BTD) if self.detach else target_BTD, segment_ids_BT)
        hidden_BTD = self._decode_rows(x0_BTD, context, read_BTD)
        return target_BTD, hidden_BTD, self._write(hidden_BTD, read_BTD)

    def objective(self, batch, share):
        """Cross-entropy of P where tokens count, and lambda times the consistency of every position, counted or not."""
        target_BTD, hidden_BTD, memory_BTD = self._two_passes(batch)
        one, other = STOPS[self.stop_gradient](memory_BTD.astype(jnp.float32), target_BTD.astype(jnp.float32))
        terms = {
            "cross_entropy": self._nats(hidden_BTD, batch),
            "consistency": NORMS[self.norm](one - other) * share,
        }
        total_BT = terms["cross_entropy"] + self.weight * terms["consistency"]
        if self.prefiller_weight:
            terms["prefiller_cross_entropy"] = self._nats(target_BTD, batch)
            total_BT += self.prefiller_weight * terms["prefiller_cross_entropy"]
        return total_BT, terms

    def _lifted(self, batch):
        return self._nats(self._two_passes(batch)[1], batch)

    def flops_per_token(self, seq_len: int) -> Flops:
        """Forward: of P, which decodes; training: of both passes."""
        stack = self if self.prefiller.stack is None else self.prefiller.stack
        prefiller = self._pass_flops(stack, self.prefiller_windows, seq_len, injected=False)
        if self.prefiller_weight:
            prefiller += self._head_flops()
        decoder = self._decoder_flops(seq_len)
        return dataclasses.replace(decoder, training=decoder.training + prefiller.training)
