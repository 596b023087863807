"""The Latent Recurrent Transformer (arXiv 2605.26797, "layerwise"): Maglev's ancestor, without a prefiller.

It reads its memory like Maglev, and adds it to the stream of every layer; trained by passes over whole rows, each fed by
the final states of the one before, the first by zeros.

B batch, T time, N = T / S positions of one turn, D model width, H query heads, G key/value heads, K head size.
"""

import dataclasses

import jax.numpy as jnp

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops
from mesanet_jax.models.memory import MemoryModel
from mesanet_jax.schema import Field
from mesanet_kernels import attention


def _default(name: str, value) -> dict[str, Field]:
    """A field of every memory model with LRT's default."""
    return {name: dataclasses.replace(MemoryModel.FIELDS[name], default=value)}


class LRT(MemoryModel):
    """Of the released code, but for the value embeddings: theirs have a third gate of the kind of the other two."""

    FIELDS = MemoryModel.FIELDS | _default("gate_channels", 32) | _default("mix_keys", "raw") | _default("memory_scale_init", 0.1) | {
        "schedule": Field("interleaved", "how the memory is trained: positions by turns, or whole rows refined", choices=("interleaved", "refined"), fixed=True),
        "turns": Field(2, "S of interleaved: position t is computed again in turn t % S", at_least=1, fixed=True),
        "refinements": Field(2, "K of refined: passes after the first", at_least=1, fixed=True),
    }  # fmt: skip

    def __init__(self, model, *, rngs):
        super().__init__(model, rngs=rngs)
        self.schedule, self.turns, self.refinements = model.schedule, model.turns, model.refinements

    def objective(self, batch, share):
        """The mean over all passes of their cross-entropies; the last one's is a term of its own."""
        passes = self._passes(batch)
        weight = sum(times for times, _ in passes)
        total_BT = sum(times * nats_BT for times, nats_BT in passes) / weight
        return total_BT, {"cross_entropy": passes[-1][1]}

    def _lifted(self, batch):
        return self._passes(batch)[-1][1]

    def _passes(self, batch):
        return {"refined": self._refined, "interleaved": self._interleaved}[self.schedule](batch)

    def _refined(self, batch):
        """[(weight, nats)] of K + 1 passes over whole rows."""
        x0_BTD, context = self._rows(batch["inputs"], batch["segment_ids"])
        memory_BTD, passes = jnp.zeros_like(x0_BTD), []
        for _ in range(self.refinements + 1):
            read_BTD = self._shift(memory_BTD, batch["segment_ids"])
            hidden_BTD = self._decode_rows(x0_BTD, context, read_BTD)
            memory_BTD = self._write(hidden_BTD, read_BTD)
            passes.append((1, self._nats(hidden_BTD, batch)))
        return passes

    def _interleaved(self, batch):
        """The same of a pass without a memory and of S turns over it, whose losses are means over T / S tokens each."""
        x0_BTD, context = self._rows(batch["inputs"], batch["segment_ids"])
        segment_ids_BT, turns = batch["segment_ids"], self.turns
        if x0_BTD.shape[1] % turns:
            raise UserError(f"config.model.turns={turns}: must divide a row's {x0_BTD.shape[1]} tokens")
        hidden_BTD, caches, memory_BTD = None, (None, None), jnp.zeros_like(x0_BTD)
        for turn in (None, *range(turns)):
            here = slice(None) if turn is None else slice(turn, None, turns)
            read_BND = self._shift(memory_BTD, segment_ids_BT)[:, here]
            of_turn = context._replace(
                tokens_BT=context.tokens_BT[:, here], positions_T=context.positions_T[here], memory_BTD=read_BND,
                attend=attend_turn(here, self._segments(segment_ids_BT)),
            )  # fmt: skip
            new_BND, caches = self._pass(self, self.scales, self.pattern_windows, x0_BTD[:, here], of_turn, caches)
            written_BND = self._write(new_BND, read_BND)
            if turn is None:
                hidden_BTD, memory_BTD, first = new_BND, written_BND, self._nats(new_BND, batch)
            else:
                hidden_BTD = hidden_BTD.at[:, here].set(new_BND)
                memory_BTD = memory_BTD.at[:, here].set(written_BND)
        return [(1, first), (turns, self._nats(hidden_BTD, batch))]

    def flops_per_token(self, seq_len: int) -> Flops:
        """Forward: of decoding; training: of every pass, the S turns making one."""
        decoder = self._decoder_flops(seq_len)
        passes = 1 + (self.refinements if self.schedule == "refined" else 1)
        return dataclasses.replace(decoder, training=passes * decoder.training)


def attend_turn(here: slice, segment_ids_BT):
    """`Context.attend` for the positions `here` of rows whose other keys and values are in the cache, a pair [B,T,G,K].

    The kernels take as many queries as keys: the queries of other positions are zeros, and dropped.
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
