"""Maglev (arXiv 2608.02870): a decoder P that reads its own memory through keys and values, trained in parallel.

    m' = Q(x)    m = P(x, shift(m'))    loss = cross-entropy(head m) + lambda mean_t ||m_t - m'_t|| / sqrt(D)

(Eq. 3-5.) The prefiller Q is a causal Transformer without a memory. At inference it is dropped, and P reads its own m
(Eq. 10). Which of the two modes the published scores come from is not known, so both losses are reported (`scores`): P
alone is "deployed", P after Q is "lifted".

B batch, T time, D model width.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops
from mesanet_jax.models import nanochat_fields
from mesanet_jax.models.deployment import deployed_states, extend_by_steps
from mesanet_jax.models.interface import Batch, LayerStats
from mesanet_jax.models.memory import memory_fields
from mesanet_jax.models.nanochat_backbone import EMBEDDING_INIT, NanochatBackbone, Pass, State, make_period
from mesanet_jax.models.residual import Scales
from mesanet_jax.models.stack import Maker, Stack
from mesanet_jax.models.vocabulary import Vocabulary
from mesanet_jax.schema import Config, Field


def _length(x_BTD):
    """||x|| / sqrt(D). In a fresh shared model, m = m' at the first token, where the root's derivative is infinite: the
    1e-12 keeps the gradient finite."""
    return jnp.sqrt((jnp.sum(jnp.square(x_BTD), axis=-1) + 1e-12) / x_BTD.shape[-1])


def _mean_square(x_BTD):
    return jnp.mean(jnp.square(x_BTD), axis=-1)


NORMS = {"l2": _length, "squared": _mean_square}  # of m - m', [B,T,D] float32 -> [B,T]
# (m, m') as the consistency term sees them: with a stopped gradient, the term does not move that side.
STOPS = {
    "none": lambda m, target: (m, target),
    "target": lambda m, target: (m, jax.lax.stop_gradient(target)),
    "both": lambda m, target: (jax.lax.stop_gradient(m), jax.lax.stop_gradient(target)),
}


class Prefiller(nnx.Module):
    """What Q does not share with P: its residual scalars and, with separate stacks, its blocks and an embedding."""

    def __init__(self, model: Config, makers: Sequence[Maker], *, rngs: nnx.Rngs):
        separate = model.sharing == "separate"
        self.scales = Scales(model.layers, rngs=rngs)
        self.stack = Stack(makers, model.layers, rngs=rngs) if separate else None
        table = Vocabulary.of(model).table
        self.embedding = table(model.dim, EMBEDDING_INIT, rngs=rngs) if separate and model.prefiller_embedding else None


class Maglev(NanochatBackbone):
    """The model kind `maglev` (a `Decoder`): P, which is the backbone and decodes, and Q.

    What the paper leaves open is a field, whose default is the likeliest reading.
    """

    MIXERS = nanochat_fields.LAYERS
    FIELDS = (
        nanochat_fields.FIELDS
        | memory_fields()
        | {
            "prefiller_pattern": Field(
                ("sliding", "attention"), "layers of the prefiller Q by depth, as `pattern` is for P", fixed=True
            ),
            "sharing": Field(
                "shared",
                "P and Q share all blocks but have their own residual scalars, or they have separate stacks",
                choices=("shared", "separate"),
                fixed=True,
            ),
            "prefiller_embedding": Field(
                False, "give Q an embedding of its own (only if sharing=separate)", fixed=True
            ),
            "consistency_weight": Field(0.1, "lambda, the weight of the consistency term", at_least=0.0, fixed=True),
            "consistency_norm": Field(
                "l2",
                "norm of m - m': its length divided by sqrt(dim), or its mean square",
                choices=tuple(NORMS),
                fixed=True,
            ),
            "stop_gradient": Field(
                "none",
                "where the consistency term's gradient stops: nowhere, at m', or at both, which only measures it",
                choices=tuple(STOPS),
                fixed=True,
            ),
            "detach_memory": Field(
                False,
                "stop the gradient of P's cross-entropy at m', so that Q learns from the consistency term alone",
                fixed=True,
            ),
            "prefiller_loss_weight": Field(
                0.0, "weight of a cross-entropy of Q, computed with P's head", at_least=0.0, fixed=True
            ),
        }
    )  # fmt: skip

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError for a combination of fields that no such model can have."""
        nanochat_fields.check(model)
        layers = nanochat_fields.LAYERS
        for name in model.prefiller_pattern:
            if name not in layers:
                raise UserError(
                    f"config.model.prefiller_pattern: no layer {name!r}; choose from {', '.join(sorted(layers))}"
                )
        if not model.prefiller_pattern:
            raise UserError("config.model.prefiller_pattern: names no layer")
        if model.prefiller_embedding and model.sharing == "shared":
            raise UserError("config.model.prefiller_embedding=true: needs config.model.sharing=separate")

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        super().__init__(model, patterns=(model.pattern, model.prefiller_pattern), memory=True, rngs=rngs)
        period = len(self.windows)
        self.prefiller = Prefiller(model, make_period(model, period, memory=False), rngs=rngs)
        self.prefiller_windows = nanochat_fields.windows(model, model.prefiller_pattern, period)
        self.consistency_weight, self.consistency_norm = model.consistency_weight, model.consistency_norm
        self.stop_gradient, self.detach_memory = model.stop_gradient, model.detach_memory
        self.prefiller_loss_weight = model.prefiller_loss_weight

    @property
    def prefiller_pass(self) -> Pass:
        """The blocks of Q."""
        blocks = self if self.prefiller.stack is None else self.prefiller.stack
        return Pass(blocks, self.prefiller.scales, self.prefiller_windows)

    # ---- training

    def two_passes(self, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The lifted pass over whole rows: m' of Q, the final states of P, the memory m that P leaves; each [B,T,D]."""
        tokens_BT, segment_ids_BT = batch["inputs"], batch["segment_ids"]
        x0_BTD, context = self.rows(tokens_BT, segment_ids_BT)
        own = self.prefiller.embedding
        prefiller_x0_BTD = x0_BTD if own is None else self.rows(tokens_BT, segment_ids_BT, own)[0]
        target_BTD, _ = self.run(self.prefiller_pass, prefiller_x0_BTD, context)
        given_BTD = jax.lax.stop_gradient(target_BTD) if self.detach_memory else target_BTD
        read_BTD = self.read_memory(given_BTD, segment_ids_BT)
        hidden_BTD = self.run_with_memory(x0_BTD, context, read_BTD)
        return target_BTD, hidden_BTD, self.write_memory(hidden_BTD, read_BTD)

    def objective(self, batch: Batch, share: jax.Array | float) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The cross-entropy of P over valid tokens, plus lambda times the consistency of all positions (Eq. 5)."""
        target_BTD, hidden_BTD, memory_BTD = self.two_passes(batch)
        m_BTD, m_target_BTD = STOPS[self.stop_gradient](memory_BTD.astype(jnp.float32), target_BTD.astype(jnp.float32))
        terms = {
            "cross_entropy": self.cross_entropy(hidden_BTD, batch),
            "consistency": NORMS[self.consistency_norm](m_BTD - m_target_BTD) * share,
        }
        total_BT = terms["cross_entropy"] + self.consistency_weight * terms["consistency"]
        if self.prefiller_loss_weight:
            terms["prefiller_cross_entropy"] = self.cross_entropy(target_BTD, batch)
            total_BT += self.prefiller_loss_weight * terms["prefiller_cross_entropy"]
        return total_BT, terms

    # ---- evaluation

    def loss(self, batch: Batch) -> jax.Array:
        """The deployed loss: the negative log-likelihood of each target in nats, times its weight, [B,T] float32."""
        return self.cross_entropy(deployed_states(self, batch)[0], batch)

    def scores(self, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """The deployed loss, the lifted loss of P after Q, and the number of sweeps."""
        hidden_BTD, computation = deployed_states(self, batch)
        lifted_BT = self.cross_entropy(self.two_passes(batch)[1], batch)
        return self.cross_entropy(hidden_BTD, batch), {"lifted": lifted_BT}, computation

    def layer_stats(self, batch: Batch) -> LayerStats:
        """Empty: attention layers have no statistics."""
        return {}

    # ---- decoding

    def extend(self, tokens_BT: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Reads T further tokens of one document: (logits [B,T,V] float32, state)."""
        return extend_by_steps(self, tokens_BT, state)

    # ---- sizes

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`: forward, those of P, which decodes; training, those of P and Q."""
        prefiller = self.pass_flops(self.prefiller_pass, seq_len, memory=False)
        if self.prefiller_loss_weight:
            prefiller += self.head_flops()
        decoder = self.decoder_flops(seq_len)
        return dataclasses.replace(decoder, training=decoder.training + prefiller.training)
