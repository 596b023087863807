"""Decoders with a memory: the final state of each position is read by the next one, in every layer.

Such a model is recurrent: its loss as it decodes (`deployed`) needs the memory that it makes itself. There are two ways
to it. Exactly, one decoding step after another; or by sweeps over whole rows, m <- P(x, shift(m)) from zeros (Jacobi), of
which T always suffice, since sweep k makes the first k positions right, and mostly far fewer.
Training reads a memory that is known in parallel (`lifted`): how it comes about is the subclass's.

B batch, T time, D model width.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.flops import Flops, products
from mesanet_jax.layers import Linear
from mesanet_jax.models import injection
from mesanet_jax.models.nanochat import Nanochat, State, shifted, starts
from mesanet_jax.schema import Field


class MemoryModel(Nanochat):
    """nanochat's Transformer with a memory in the keys and values of every layer."""

    INJECTED = True
    FIELDS = Nanochat.FIELDS | injection.FIELDS | {
        "memory_scale_init": Field(None, "the memory is also added to every layer's stream, by a scalar that starts here; none: not", kind=float, fixed=True),
        "memory_at_documents": Field(
            "as_attention", "where a document starts the memory flows on or is zeroed; as_attention: by reset_at_documents",
            choices=("as_attention", "flows", "zeroed"), fixed=True,
        ),
        "forget_gate": Field(False, "the memory is f m_before + (1 - f) final state, f a gate a channel of that state", fixed=True),
        "deployed_by": Field("sweeps", "how the deployed loss is computed: by parallel sweeps, or exactly, step by step", choices=("sweeps", "steps")),
        # Above what bfloat16 rounds, 0.004, which need not settle; it bounds the worst position of a batch, others are closer.
        "sweep_tolerance": Field(1e-2, "sweeps end when no memory changes by more, in root mean square (of its size 1)", at_least=0.0),
        "max_sweeps": Field(None, "sweeps at most; none: as many as a row has tokens, which is exact", kind=int, at_least=1),
    }  # fmt: skip

    def __init__(self, model, *, rngs: nnx.Rngs):
        super().__init__(model, memory_scale=model.memory_scale_init, rngs=rngs)
        zeros, width = jax.nn.initializers.zeros, model.dim
        gate = lambda: Linear(width, width, axes=("embed", None), rngs=rngs, init=zeros, bias_init=zeros)
        self.forget = gate() if model.forget_gate else None
        follows = {"as_attention": model.reset_at_documents, "flows": False, "zeroed": True}
        self.memory_resets = follows[model.memory_at_documents]
        self.deployed_by, self.tolerance, self.max_sweeps = model.deployed_by, model.sweep_tolerance, model.max_sweeps

    # ---- the memory

    def _shift(self, memory_BTD, segment_ids_BT):
        """What each position reads: exactly the position before's memory; none at the first, and where it is reset."""
        return shifted(memory_BTD, starts(segment_ids_BT) if self.memory_resets else None)

    def _write(self, hidden_BTD, memory_BTD):
        """The memory that positions leave, from their final state and the memory they read."""
        if self.forget is None:
            return hidden_BTD
        kept_BTD = jax.nn.sigmoid(self.forget(hidden_BTD))
        return kept_BTD * memory_BTD + (1 - kept_BTD) * hidden_BTD

    def _decode_rows(self, x0_BTD, context, memory_BTD):
        """The decoder over whole rows given what each position reads: its final states."""
        context = context._replace(memory_BTD=memory_BTD)
        return self._pass(self, self.scales, self.pattern_windows, x0_BTD, context)[0]

    # ---- the loss of decoding

    def hidden(self, tokens_BT, segment_ids_BT):
        """The deployed decoder's final states, [B,T,D]."""
        return self._deployed(tokens_BT, segment_ids_BT)[0]

    def _deployed(self, tokens_BT, segment_ids_BT):
        """Those, and scalars about their computation."""
        ways = {"sweeps": self._by_sweeps, "steps": self._by_steps}
        return ways[self.deployed_by](tokens_BT, segment_ids_BT)

    def _by_sweeps(self, tokens_BT, segment_ids_BT):
        x0_BTD, context = self._rows(tokens_BT, segment_ids_BT)
        most = min(self.max_sweeps or tokens_BT.shape[1], tokens_BT.shape[1])

        def unsettled(carry):
            sweeps, change, *_ = carry
            return (change > self.tolerance) & (sweeps < most)

        def sweep(carry):
            sweeps, _, before_BTD, _ = carry
            read_BTD = self._shift(before_BTD, segment_ids_BT)
            hidden_BTD = self._decode_rows(x0_BTD, context, read_BTD)
            memory_BTD = self._write(hidden_BTD, read_BTD)
            difference_BTD = memory_BTD.astype(jnp.float32) - before_BTD
            change = jnp.sqrt(jnp.max(jnp.mean(jnp.square(difference_BTD), axis=-1)))
            return sweeps + 1, change, memory_BTD, hidden_BTD

        nothing_BTD = jnp.zeros_like(x0_BTD)
        begin = (jnp.zeros((), jnp.int32), jnp.asarray(jnp.inf, jnp.float32), nothing_BTD, nothing_BTD)
        sweeps, _, _, hidden_BTD = jax.lax.while_loop(unsettled, sweep, begin)
        return hidden_BTD, {"sweeps": sweeps}

    def _by_steps(self, tokens_BT, segment_ids_BT):
        """One decoding step a token; each row has a state of its own, since documents start where they do."""

        def row(tokens_T, starts_T):
            empty = self.init_state(1, max_length=len(tokens_T))

            def one(state, given):
                token, start = given
                hidden_11D, state = self._advance(token[None, None], self._at_start(start, state, empty))
                return state, hidden_11D[0, 0]

            return jax.lax.scan(one, empty, (tokens_T, starts_T))[1]

        return jax.vmap(row)(tokens_BT, starts(segment_ids_BT)), {}

    def _at_start(self, start, state: State, empty: State) -> State:
        """The state, with what a document's start resets made empty where `start`; positions go on as they do in rows."""
        chosen = lambda reset: lambda old, new: jnp.where(start & reset, new, old)
        memory_BD = chosen(self.memory_resets)(state.memory_BD, empty.memory_BD)
        after = jax.tree.map(chosen(self.resets), state, empty)
        return after._replace(position=state.position, memory_BD=memory_BD)

    def loss(self, batch):
        """Nats of the deployed decoder, as `LanguageModel.loss`; not to be differentiated: that is `objective`."""
        return self._nats(self.hidden(batch["inputs"], batch["segment_ids"]), batch)

    def scores(self, batch):
        """The deployed loss, and the lifted one, of the pass that training ends with."""
        hidden_BTD, told = self._deployed(batch["inputs"], batch["segment_ids"])
        return self._nats(hidden_BTD, batch), {"lifted": self._lifted(batch)}, told

    def _lifted(self, batch):
        """Nats of the decoder with the memory that training gives it."""
        raise NotImplementedError

    # ---- decoding

    def _advance(self, tokens_BT, state: State):
        """As nanochat's, of one token, which also writes the memory."""
        hidden_B1D, after = super()._advance(tokens_BT, state)
        memory_B1D = self._write(hidden_B1D, state.memory_BD[:, None])
        return hidden_B1D, after._replace(memory_BD=memory_B1D[:, 0])

    def extend(self, tokens_BT, state: State):
        """Reads T tokens of one document, one after another: a recurrence has no other exact way."""
        scan = lambda state, tokens_B: self.step(tokens_B, state)[::-1]
        state, logits_TBV = jax.lax.scan(scan, state, tokens_BT.T)
        return jnp.moveaxis(logits_TBV, 0, 1), state

    def step(self, tokens_B, state: State):
        hidden_B1D, state = self._advance(tokens_B[:, None], state)
        return self.logits(hidden_B1D[:, 0]), state

    def _decoder_flops(self, seq_len: int) -> Flops:
        """Of one token in one pass of the decoder."""
        forget = Flops() if self.forget is None else products(2 * math.prod(self.forget.kernel.shape))
        return self._pass_flops(self, self.pattern_windows, seq_len, injected=True) + self._head_flops() + forget
