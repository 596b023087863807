"""The Transformer of nanochat (karpathy/nanochat 92d63d4), which Maglev and LRT also build on.

    x_0 = norm(embedding);   x = r_l x + e_l x_0 before block l;   logits = 15 tanh(head norm(x) / 15)

`Nanochat`, `Maglev` and `LRT` derive from this class, add their losses and their decoding, and override nothing.

B batch, T time, D model width, L layers, P blocks per period, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.flops import Flops, mean_context, products
from mesanet_jax.layers import param, rms_normalize
from mesanet_jax.mesh import constrain
from mesanet_jax.models.block import ACTIVATION
from mesanet_jax.models.interface import Batch
from mesanet_jax.models.memory import MemoryRules, forget_gate
from mesanet_jax.models.nanochat_block import Context, NanochatBlock, attend_cached, attend_rows
from mesanet_jax.models.nanochat_fields import has_value_embedding, period, windows
from mesanet_jax.models.neighbours import left_neighbours
from mesanet_jax.models.residual import LayerScales, Scales, Smear, mix
from mesanet_jax.models.stack import HasBlocks, Maker, Pair, init_states, make_blocks, scan, split_layers
from mesanet_jax.models.vocabulary import Vocabulary
from mesanet_jax.schema import Config

EMBEDDING_INIT, HEAD_INIT = jax.nn.initializers.normal(0.8), jax.nn.initializers.normal(0.001)


class State(NamedTuple):
    """A decoding state: what the next token needs of those before it."""

    caches: Pair  # keys and values
    position: jax.Array  # the number of tokens read
    embedded_BD: jax.Array | None  # the last token's normed embedding, for smear
    memory_BD: jax.Array | None  # the memory that the last token left, in models with a memory


class Pass(NamedTuple):
    """The blocks that rows pass through, with their residual scalars and the window of each block of a period."""

    blocks: HasBlocks
    scales: Scales
    windows: tuple[int | None, ...]


def make_period(model: Config, length: int, *, memory: bool) -> list[Maker]:
    """The makers of one period of blocks. With `memory`, each block has the parameters to read one."""
    return [
        partial(NanochatBlock, model, value_embedding=has_value_embedding(model, block), memory=memory)
        for block in range(length)
    ]


class NanochatBackbone(nnx.Module):
    """nanochat's Transformer, optionally with a memory that every layer reads.

    Args:
      model: `config.model`, with the fields of `nanochat_fields`; with a memory also those of `memory`.
      patterns: the patterns of layers that must repeat with the blocks' period; the decoder's own comes first.
      memory: whether each position reads the memory that the position before left (Maglev, LRT).
    """

    def __init__(self, model: Config, *, patterns: tuple[tuple[str, ...], ...], memory: bool, rngs: nnx.Rngs):
        length = period(model, *patterns)
        self.vocabulary = Vocabulary.of(model)
        self.embedding = self.vocabulary.table(model.dim, EMBEDDING_INIT, rngs=rngs)
        self.head = self.vocabulary.table(model.dim, HEAD_INIT, rngs=rngs)
        self.groups, self.tail = make_blocks(make_period(model, length, memory=memory), model.layers, rngs=rngs)
        self.scales = Scales(model.layers, memory_scale=model.memory_scale_init if memory else None, rngs=rngs)
        self.smear = Smear(model.dim, rngs=rngs) if model.smear else None
        self.backout = param(rngs, jax.nn.initializers.constant(0.2), (1,), (None,)) if model.backout else None
        self.memory_rules = MemoryRules.of(model) if memory else None
        self.forget = forget_gate(model, rngs=rngs) if memory and model.forget_gate else None
        self.windows = windows(model, patterns[0], length)
        self.layers, self.eps = model.layers, model.norm_eps
        self.remat, self.looped = model.remat, model.scan_layers
        self.resets, self.dtype = model.reset_at_documents, jnp.dtype(model.compute_dtype)

    @property
    def decoder(self) -> Pass:
        """The blocks of this module itself."""
        return Pass(self, self.scales, self.windows)

    # ---- one pass over the blocks

    def run(
        self, through: Pass, x0_BTD: jax.Array, context: Context, caches: Pair = (None, None)
    ) -> tuple[jax.Array, Pair]:
        """The stream after the blocks and the final norm (which has no gain), [B,T,D], and the blocks' caches."""
        is_middle_L = jnp.arange(self.layers) == self.layers // 2

        def call(group, carry, given):
            (scales_P, is_middle_P), caches = given
            x_BTD, middle_BTD = carry
            after = []
            for index, (block, window) in enumerate(zip(group.blocks, through.windows)):
                scales = LayerScales._make(s if s is None else s[index] for s in scales_P)
                x_BTD = mix(scales, x_BTD, x0_BTD, context.memory_BTD)
                x_BTD, cache = block(x_BTD, context, caches and caches[index], window)
                after.append(cache)
                if middle_BTD is not None:
                    middle_BTD = jnp.where(is_middle_P[index], x_BTD, middle_BTD)
            return (x_BTD, middle_BTD), tuple(after)

        of_layers = split_layers(through.blocks, (through.scales.of_layers(), is_middle_L))
        carry = (x0_BTD, None if self.backout is None else x0_BTD)
        given = (of_layers[0], caches[0]), (of_layers[1], caches[1])
        (x_BTD, middle_BTD), caches = scan(through.blocks, call, carry, given, policy=self.remat, looped=self.looped)
        if self.backout is not None:
            x_BTD = (x_BTD - self.backout[...] * middle_BTD).astype(self.dtype)
        return rms_normalize(x_BTD, self.eps), caches

    def _embed(self, embedding_VD: nnx.Param, tokens_BT, before: Callable) -> tuple[jax.Array, jax.Array]:
        """x_0 and the normed embeddings; `before` gives the embedding of the token before each one, for smear."""
        e_BTD = rms_normalize(embedding_VD[...].astype(self.dtype)[tokens_BT], self.eps)
        x0_BTD = e_BTD if self.smear is None else self.smear(e_BTD, before(e_BTD))
        return constrain(x0_BTD, ACTIVATION), e_BTD

    # ---- whole rows

    def rows(
        self, tokens_BT: jax.Array, segment_ids_BT: jax.Array, embedding_VD: nnx.Param | None = None
    ) -> tuple[jax.Array, Context]:
        """x_0 of whole rows and the context of a pass over them; `embedding_VD` replaces the model's embedding."""
        segments_BT = self.attention_segments(segment_ids_BT)
        embedding_VD = self.embedding if embedding_VD is None else embedding_VD
        x0_BTD, _ = self._embed(embedding_VD, tokens_BT, lambda e_BTD: left_neighbours(e_BTD, segments_BT))
        return x0_BTD, Context(tokens_BT, jnp.arange(tokens_BT.shape[1]), attend_rows(segments_BT))

    def attention_segments(self, segment_ids_BT: jax.Array) -> jax.Array | None:
        """The ids that keep documents apart; None if documents read each other, as in nanochat itself."""
        return segment_ids_BT if self.resets else None

    def cross_entropy(self, hidden_BTD: jax.Array, batch: Batch) -> jax.Array:
        """The negative log-likelihood of each target in nats, times its weight: [B,T] float32."""
        return self.vocabulary.cross_entropy(hidden_BTD, self.head, batch)

    # ---- the memory

    def read_memory(self, memory_BTD: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
        """What each position reads: the memory that the position before left; zero where the memory is reset."""
        assert self.memory_rules is not None
        return left_neighbours(memory_BTD, segment_ids_BT if self.memory_rules.resets else None)

    def write_memory(self, hidden_BTD: jax.Array, read_BTD: jax.Array) -> jax.Array:
        """The memory that each position leaves, from its final state and the memory that it read."""
        if self.forget is None:
            return hidden_BTD
        kept_BTD = jax.nn.sigmoid(self.forget(hidden_BTD))
        return kept_BTD * read_BTD + (1 - kept_BTD) * hidden_BTD

    def run_with_memory(self, x0_BTD: jax.Array, context: Context, read_BTD: jax.Array) -> jax.Array:
        """The final states of whole rows, given the memory that each position reads."""
        return self.run(self.decoder, x0_BTD, context._replace(memory_BTD=read_BTD))[0]

    # ---- decoding

    def init_state(self, batch: int, *, max_length: int) -> State:
        """The decoding state of an empty past, for `batch` sequences of at most `max_length` tokens."""

        def caches(group):
            return tuple(
                block.attention.init_cache(batch, window, max_length=max_length, dtype=self.dtype)
                for block, window in zip(group.blocks, self.windows)
            )

        zeros_BD = jnp.zeros((batch, self.embedding.shape[-1]), self.dtype)
        return State(
            caches=init_states(self, caches),
            position=jnp.zeros((), jnp.int32),
            embedded_BD=None if self.smear is None else zeros_BD,
            memory_BD=None if self.memory_rules is None else zeros_BD,
        )

    def advance(self, tokens_BT: jax.Array, state: State) -> tuple[jax.Array, State]:
        """The final states of the next tokens, and the state after them; with a memory, T must be 1."""

        def before(e_BTD):
            assert state.embedded_BD is not None
            return jnp.concatenate([state.embedded_BD[:, None], e_BTD[:, :-1]], axis=1)

        x0_BTD, e_BTD = self._embed(self.embedding, tokens_BT, before)
        positions_T = state.position + jnp.arange(tokens_BT.shape[1])
        read_BTD = None if state.memory_BD is None else state.memory_BD[:, None]
        context = Context(tokens_BT, positions_T, attend_cached, read_BTD)
        hidden_BTD, caches = self.run(self.decoder, x0_BTD, context, state.caches)
        return hidden_BTD, State(
            caches=caches,
            position=positions_T[-1] + 1,
            embedded_BD=None if self.smear is None else e_BTD[:, -1],
            memory_BD=None if read_BTD is None else self.write_memory(hidden_BTD, read_BTD)[:, 0],
        )

    def decode_step(self, tokens_B: jax.Array, state: State) -> tuple[jax.Array, State]:
        """Reads one further token: (logits [B,V] float32, state)."""
        hidden_B1D, state = self.advance(tokens_B[:, None], state)
        return self.vocabulary.logits(hidden_B1D[:, 0], self.head), state

    # ---- sizes

    def pass_flops(self, through: Pass, seq_len: int, *, memory: bool) -> Flops:
        """FLOPs of one token in one pass; with `memory`, the projections of the memory are included."""
        leaves = nnx.to_flat_state(nnx.state((through.blocks.groups, through.blocks.tail)))
        kernels = [leaf for path, leaf in leaves if path[-1] == "kernel" and (memory or "injection" not in path)]
        width = through.blocks.groups.blocks[0].attention.query.kernel.shape[-1]
        seen = sum(mean_context(seq_len, through.windows[i % len(through.windows)]) for i in range(self.layers))
        return products(sum(2 * math.prod(kernel.shape) for kernel in kernels) + 4 * width * seen)

    def head_flops(self) -> Flops:
        """FLOPs of one token in the head."""
        return products(2 * self.vocabulary.size * self.embedding.shape[-1])

    def decoder_flops(self, seq_len: int) -> Flops:
        """FLOPs of one token in one pass of the decoder, the head and the memory included."""
        forget = Flops() if self.forget is None else products(2 * math.prod(self.forget.kernel.shape))
        memory = self.memory_rules is not None
        return self.pass_flops(self.decoder, seq_len, memory=memory) + self.head_flops() + forget

    def padding_parameters(self) -> int:
        """The number of parameters in table rows that only pad the vocabulary."""
        return self.vocabulary.padding_parameters(self)
