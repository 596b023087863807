"""The Latent Recurrent Transformer, "layerwise" (LRT, arXiv 2605.26797): Maglev's predecessor, without a prefiller.

Like Maglev, it reads its memory through keys and values; it also adds the memory to the stream of every layer.
Training runs several passes over whole rows. The first pass reads zeros, and each further pass reads the final states
of the one before.

B batch, T time, N = T / S positions of one turn, D model width, H query heads, G key/value heads, K head size.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops
from mesanet_jax.models import nanochat_fields
from mesanet_jax.models.deployment import deployed_states, extend_by_steps
from mesanet_jax.models.interface import Batch, LayerStats
from mesanet_jax.models.memory import memory_fields
from mesanet_jax.models.nanochat_backbone import NanochatBackbone, State
from mesanet_jax.schema import Config, Field
from mesanet_kernels import attention


class LRT(NanochatBackbone):
    """The model kind `lrt` (a `Decoder`), as the released code except for value embeddings.

    There, the gate of a value embedding has the form of the two gates of the memory; here, it is nanochat's.
    """

    MIXERS = nanochat_fields.LAYERS
    FIELDS = (
        nanochat_fields.FIELDS
        | memory_fields(gate_channels=32, mix_keys="raw", memory_scale=0.1)
        | {
            "schedule": Field(
                "interleaved",
                "passes of training: recompute positions in turns (interleaved), or whole rows (refined)",
                choices=("interleaved", "refined"),
                fixed=True,
            ),
            "turns": Field(
                2,
                "with interleaved: the number of turns S; position t is recomputed in turn t % S",
                at_least=1,
                fixed=True,
            ),
            "refinements": Field(2, "with refined: the number of passes after the first", at_least=1, fixed=True),
        }
    )  # fmt: skip

    @staticmethod
    def check(model: Config) -> None:
        """Raises UserError for a combination of fields that no such model can have."""
        nanochat_fields.check(model)

    def __init__(self, model: Config, *, rngs: nnx.Rngs):
        super().__init__(model, patterns=(model.pattern,), memory=True, rngs=rngs)
        self.schedule, self.turns, self.refinements = model.schedule, model.turns, model.refinements

    # ---- training

    def objective(self, batch: Batch, share: jax.Array | float) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The mean of the cross-entropies of all passes; that of the last pass is also a term of its own."""
        passes = self._passes(batch)
        weight = sum(times for times, _ in passes)
        total_BT = sum((times * nats_BT for times, nats_BT in passes), jnp.zeros(())) / weight
        return total_BT, {"cross_entropy": passes[-1][1]}

    def _passes(self, batch: Batch) -> list[tuple[int, jax.Array]]:
        """(the number of passes that it stands for, its cross-entropy [B,T]) for each pass or round of turns."""
        return {"refined": self._refined, "interleaved": self._interleaved}[self.schedule](batch)

    def _refined(self, batch: Batch):
        """K + 1 passes over whole rows."""
        x0_BTD, context = self.rows(batch["inputs"], batch["segment_ids"])
        memory_BTD, passes = jnp.zeros_like(x0_BTD), []
        for _ in range(self.refinements + 1):
            read_BTD = self.read_memory(memory_BTD, batch["segment_ids"])
            hidden_BTD = self.run_with_memory(x0_BTD, context, read_BTD)
            memory_BTD = self.write_memory(hidden_BTD, read_BTD)
            passes.append((1, self.cross_entropy(hidden_BTD, batch)))
        return passes

    def _interleaved(self, batch: Batch):
        """One pass without a memory, then S turns over it, whose S losses are means over T / S tokens each."""
        x0_BTD, context = self.rows(batch["inputs"], batch["segment_ids"])
        segment_ids_BT, turns = batch["segment_ids"], self.turns
        if x0_BTD.shape[1] % turns:
            raise UserError(f"config.model.turns={turns}: must divide the {x0_BTD.shape[1]} tokens of a row")

        def run_at(here: slice, caches, memory_BTD):
            """The final states, the caches and the memory after recomputing the positions `here`."""
            read_BND = self.read_memory(memory_BTD, segment_ids_BT)[:, here]
            of_turn = context._replace(
                tokens_BT=context.tokens_BT[:, here],
                positions_T=context.positions_T[here],
                memory_BTD=read_BND,
                attend=attend_turn(here, self.attention_segments(segment_ids_BT)),
            )
            hidden_BND, caches = self.run(self.decoder, x0_BTD[:, here], of_turn, caches)
            return hidden_BND, caches, self.write_memory(hidden_BND, read_BND)

        hidden_BTD, caches, memory_BTD = run_at(slice(None), (None, None), jnp.zeros_like(x0_BTD))
        first_BT = self.cross_entropy(hidden_BTD, batch)
        for turn in range(turns):
            here = slice(turn, None, turns)
            hidden_BND, caches, memory_BND = run_at(here, caches, memory_BTD)
            hidden_BTD = hidden_BTD.at[:, here].set(hidden_BND)
            memory_BTD = memory_BTD.at[:, here].set(memory_BND)
        return [(1, first_BT), (turns, self.cross_entropy(hidden_BTD, batch))]

    # ---- evaluation

    def loss(self, batch: Batch) -> jax.Array:
        """The deployed loss: the negative log-likelihood of each target in nats, times its weight, [B,T] float32."""
        return self.cross_entropy(deployed_states(self, batch)[0], batch)

    def scores(self, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array], dict[str, jax.Array]]:
        """The deployed loss, the lifted loss of training's last pass, and the number of sweeps."""
        hidden_BTD, computation = deployed_states(self, batch)
        return self.cross_entropy(hidden_BTD, batch), {"lifted": self._passes(batch)[-1][1]}, computation

    def layer_stats(self, batch: Batch) -> LayerStats:
        """Empty: attention layers have no statistics."""
        return {}

    # ---- decoding

    def extend(self, tokens_BT: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Reads T further tokens of one document: (logits [B,T,V] float32, state)."""
        return extend_by_steps(self, tokens_BT, state)

    # ---- sizes

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`: forward, those of decoding; training, those of all passes.

        The S turns of the interleaved schedule make up one pass.
        """
        decoder = self.decoder_flops(seq_len)
        passes = 1 + (self.refinements if self.schedule == "refined" else 1)
        return dataclasses.replace(decoder, training=passes * decoder.training)


def attend_turn(here: slice, segment_ids_BT: jax.Array | None) -> Callable:
    """`Context.attend` for the positions `here` of rows; the cache holds the keys and values of all, [B,T,G,K] each.

    The kernel takes as many queries as keys. The queries of other positions are zeros, and their outputs are dropped.
    """

    def attend(q_BNHK, k_BNGK, v_BNGK, cache, window):
        if cache is None:  # all positions
            o_BTHK = attention(q_BNHK, k_BNGK, v_BNGK, window=window, segment_ids=segment_ids_BT)
            return o_BTHK, (k_BNGK, v_BNGK)
        k_BTGK, v_BTGK = (old.at[:, here].set(new) for old, new in zip(cache, (k_BNGK, v_BNGK)))
        q_BTHK = jnp.zeros((*k_BTGK.shape[:2], *q_BNHK.shape[2:]), q_BNHK.dtype).at[:, here].set(q_BNHK)
        o_BTHK = attention(q_BTHK, k_BTGK, v_BTGK, window=window, segment_ids=segment_ids_BT)
        return o_BTHK[:, here], (k_BTGK, v_BTGK)

    return attend
