"""The backbone of nanochat (karpathy/nanochat 92d63d4): the recipe that Maglev and LRT are built on.

    x_0 = norm(embedding);   x = r_l x + e_l x_0 before block l;   logits = 15 tanh(head norm(x) / 15)

Value embeddings, smear and backout are options. Layers are full or sliding attention, as `model.pattern` repeats;
nanochat itself has three sliding layers, then a full one, and makes the last layer full whatever the pattern says: here a
pattern means what it says.

B batch, T time, D model width, L layers, P blocks of a period, V vocabulary.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from mesanet_jax.errors import UserError
from mesanet_jax.flops import Flops, mean_context, products
from mesanet_jax.layers import Linear, param, rms_normalize
from mesanet_jax.mesh import constrain
from mesanet_jax.models.block import ACTIVATION
from mesanet_jax.models.language_model import LanguageModel
from mesanet_jax.models.nanochat_block import GATE_INIT, Context, NanochatBlock, attend_cached, attend_rows
from mesanet_jax.models.stack import Stack
from mesanet_jax.schema import Field

EMBEDDING_INIT, HEAD_INIT = jax.nn.initializers.normal(0.8), jax.nn.initializers.normal(0.001)
SMEAR_CHANNELS = 24


class Full:
    """A layer in which a token sees all before it."""

    FIELDS: dict[str, Field] = {}

    @staticmethod
    def check(model) -> None:
        """Heads are the model's."""

    @staticmethod
    def window(model) -> int | None:
        return None


class Sliding(Full):
    """A layer in which it sees the last `model.window`."""

    @staticmethod
    def window(model) -> int | None:
        return model.window


class State(NamedTuple):
    """A decoding state: the pair of caches (`Stack`), tokens read, and what else the next token needs of the last one."""

    caches: Any
    position: jax.Array
    embedded_BD: jax.Array | None  # of smear
    memory_BD: jax.Array | None  # of models with a memory


class Nanochat(LanguageModel):
    """nanochat's Transformer."""

    MIXERS = {"attention": Full, "sliding": Sliding}
    INJECTED = False  # whether blocks read a memory
    FIELDS = {name: field for name, field in LanguageModel.FIELDS.items() if name != "residual_init_scale"} | {
        "mlp_ratio": Field(4.0, "feed-forward width over dim", above=0.0, fixed=True),
        "logit_softcap": Field(15.0, "c in c tanh(logits / c); none: no cap", kind=float, above=0.0, fixed=True),
        "tie_embeddings": Field(False, "never: the two tables start a thousand times apart", choices=(False,), fixed=True),
        "kv_heads": Field(None, "key/value heads, a divisor of heads; none: one a query head", kind=int, at_least=1, fixed=True),
        "window": Field(512, "tokens that a token sees in a sliding layer, itself included", at_least=1, fixed=True),
        "rope_base": Field(100_000.0, "base of the rotary frequencies", above=1.0, fixed=True),
        "qk_scale": Field(1.2, "factor on queries and keys after their norm", above=0.0, fixed=True),
        "value_embeddings": Field("none", "a table of values a token, gated: in which layers", choices=("none", "alternate", "all"), fixed=True),
        "smear": Field(False, "the embedding before is added to each, gated; it starts at 0", fixed=True),
        "backout": Field(False, "a share of the stream after the middle layer is taken off at the end; it starts at 0.2", fixed=True),
    }  # fmt: skip

    @staticmethod
    def check(model) -> None:
        LanguageModel.check(model)
        if model.heads % (model.kv_heads or model.heads):
            raise UserError(f"config.model.kv_heads={model.kv_heads}: must divide config.model.heads={model.heads}")
        if model.head_dim % 2:
            raise UserError(f"config.model.head_dim={model.head_dim}: rotary positions need an even size")

    @classmethod
    def patterns(cls, model) -> tuple[tuple[str, ...], ...]:
        """What repeats with depth: the period of the blocks is a common multiple of their lengths."""
        return (model.pattern,)

    @classmethod
    def period(cls, model) -> int:
        alternate = 2 if model.value_embeddings == "alternate" else 1
        return min(math.lcm(alternate, *map(len, cls.patterns(model))), model.layers)

    @classmethod
    def windows(cls, model, pattern: tuple[str, ...]) -> tuple[int | None, ...]:
        """What a token sees in each block of a period."""
        names = (pattern[block % len(pattern)] for block in range(cls.period(model)))
        return tuple(cls.MIXERS[name].window(model) for name in names)

    @classmethod
    def block_makers(cls, model, *, injected: bool | None = None) -> tuple[Callable[..., nnx.Module], ...]:
        injected = cls.INJECTED if injected is None else injected
        valued = {
            "none": lambda block: False,
            "alternate": lambda block: block % 2 == (model.layers - 1) % 2,  # the last layer, and every other before
            "all": lambda block: True,
        }[model.value_embeddings]
        return tuple(
            partial(NanochatBlock, model, value_embedding=valued(block), injected=injected)
            for block in range(cls.period(model))
        )

    def __init__(self, model, *, memory_scale: float | None = None, rngs: nnx.Rngs):
        self._make_tables(model, EMBEDDING_INIT, HEAD_INIT, rngs=rngs)
        Stack.__init__(self, self.block_makers(model), model.layers, rngs=rngs)
        self.scales = Scales(model.layers, memory_scale=memory_scale, rngs=rngs)
        self.smear = Smear(model.dim, rngs=rngs) if model.smear else None
        self.backout = param(rngs, jax.nn.initializers.constant(0.2), (1,), (None,)) if model.backout else None
        self.layers, self.eps = model.layers, model.norm_eps
        self.pattern_windows = self.windows(model, model.pattern)

    # ---- one pass over the blocks

    def _embedded(self, embedding_VD, tokens_BT, before: Callable):
        """x_0 and the normed embeddings, of which smear reads the neighbours that `before` gives."""
        e_BTD = rms_normalize(embedding_VD.astype(self.dtype)[tokens_BT], self.eps)
        x0_BTD = e_BTD if self.smear is None else self.smear(e_BTD, before(e_BTD))
        return constrain(x0_BTD, ACTIVATION), e_BTD

    def _pass(self, stack: Stack, scales: "Scales", windows, x0_BTD, context: Context, caches=(None, None)):
        """The normed stream after the blocks of `stack` (final norm, no gain), and their caches."""

        def call(group, carry, given):
            (of_layers, is_middle_P), caches = given
            x_BTD, middle_BTD, after = *carry, []
            for index, (block, window) in enumerate(zip(group.blocks, windows)):
                x_BTD = scales.mix(jax.tree.map(lambda s: s[index], of_layers), x_BTD, x0_BTD, context.memory_BTD)
                x_BTD, cache = block(x_BTD, context, caches and caches[index], window)
                after.append(cache)
                if middle_BTD is not None:
                    middle_BTD = jnp.where(is_middle_P[index], x_BTD, middle_BTD)
            return (x_BTD, middle_BTD), tuple(after)

        is_middle_L = jnp.arange(self.layers) == self.layers // 2
        of_layers = stack.by_group((scales.of_layers(), is_middle_L))
        carry = (x0_BTD, None if self.backout is None else x0_BTD)
        given = tuple(zip(of_layers, caches))
        (x_BTD, middle_BTD), caches = stack.scan(call, carry, given, policy=self.remat, looped=self.looped)
        if middle_BTD is not None:
            x_BTD = (x_BTD - self.backout[...] * middle_BTD).astype(self.dtype)
        return rms_normalize(x_BTD, self.eps), caches

    # ---- whole rows

    def _segments(self, segment_ids_BT):
        """None where documents read each other, as in nanochat: attention then needs no mask of them."""
        return segment_ids_BT if self.resets else None

    def _rows(self, tokens_BT, segment_ids_BT, embedding_VD=None):
        """x_0 of whole rows, and the context of a pass over them."""
        segment_ids_BT = self._segments(segment_ids_BT)
        before = lambda e_BTD: shifted(e_BTD, starts(segment_ids_BT))
        embedding_VD = self.embedding[...] if embedding_VD is None else embedding_VD
        x0_BTD, _ = self._embedded(embedding_VD, tokens_BT, before)
        return x0_BTD, Context(tokens_BT, jnp.arange(tokens_BT.shape[1]), attend_rows(segment_ids_BT))

    def hidden(self, tokens_BT, segment_ids_BT):
        """The normed stream before the head, [B,T,D]."""
        x0_BTD, context = self._rows(tokens_BT, segment_ids_BT)
        return self._pass(self, self.scales, self.pattern_windows, x0_BTD, context)[0]

    def observe(self, batch):
        """Its layers tell nothing about their work."""
        return {}

    # ---- decoding

    def init_state(self, batch: int, *, max_length: int) -> State:
        """The state of an empty past."""

        def caches(group):
            return tuple(
                block.attention.init_cache(batch, window, max_length=max_length, dtype=self.dtype)
                for block, window in zip(group.blocks, self.pattern_windows)
            )

        vector = lambda used: jnp.zeros((batch, self.embedding.shape[-1]), self.dtype) if used else None
        position = jnp.zeros((), jnp.int32)
        return State(self.init_states(caches), position, vector(self.smear is not None), vector(self.INJECTED))

    def _advance(self, tokens_BT, state: State):
        """The normed stream of the next tokens, and the state after them."""
        before = lambda e_BTD: jnp.concatenate([state.embedded_BD[:, None], e_BTD[:, :-1]], axis=1)
        x0_BTD, e_BTD = self._embedded(self.embedding[...], tokens_BT, before)
        positions_T = state.position + jnp.arange(tokens_BT.shape[1])
        memory_BTD = None if state.memory_BD is None else state.memory_BD[:, None]
        context = Context(tokens_BT, positions_T, attend_cached, memory_BTD)
        hidden_BTD, caches = self._pass(self, self.scales, self.pattern_windows, x0_BTD, context, state.caches)
        embedded_BD = None if self.smear is None else e_BTD[:, -1]
        return hidden_BTD, State(caches, positions_T[-1] + 1, embedded_BD, state.memory_BD)

    def extend(self, tokens_BT, state: State):
        hidden_BTD, state = self._advance(tokens_BT, state)
        return self.logits(hidden_BTD), state

    def step(self, tokens_B, state: State):
        logits_BTV, state = self.extend(tokens_B[:, None], state)
        return logits_BTV[:, 0], state

    # ---- sizes

    def _pass_flops(self, stack: Stack, windows, seq_len: int, *, injected: bool) -> Flops:
        """Of one token in one pass over the blocks of `stack`, the head not counted."""
        leaves = nnx.to_flat_state(nnx.state((stack.groups, stack.tail)))
        kernels = [leaf for path, leaf in leaves if path[-1] == "kernel" and (injected or "injection" not in path)]
        block = stack.groups.blocks[0].attention
        width = block.query.kernel.shape[-1]
        seen = sum(mean_context(seq_len, windows[layer % len(windows)]) for layer in range(self.layers))
        return products(sum(2 * math.prod(kernel.shape) for kernel in kernels) + 4 * width * seen)

    def _head_flops(self) -> Flops:
        return products(2 * self.vocab_size * self.embedding.shape[-1])

    def flops_per_token(self, seq_len: int) -> Flops:
        """FLOPs of one token in a row of `seq_len`."""
        return self._pass_flops(self, self.pattern_windows, seq_len, injected=False) + self._head_flops()

    def padding_parameters(self) -> int:
        leaves = nnx.to_flat_state(nnx.state(self))
        tables = [leaf for path, leaf in leaves if path[-1] in ("embedding", "head", "value_embedding")]
        return sum(math.prod(table.shape) // table.shape[-2] * (table.shape[-2] - self.vocab_size) for table in tables)


class Scales(nnx.Module):
    """Scalars a layer: of the stream r_l, 1.15 falling to 1.05, and of x_0, 0.20 falling to 0.05 (nanochat)."""

    def __init__(self, layers: int, *, memory_scale: float | None = None, rngs: nnx.Rngs):
        falling = lambda first, last: lambda key, shape, dtype: jnp.linspace(first, last, layers, dtype=dtype)
        self.residual_scale = param(rngs, falling(1.15, 1.05), (layers,), (None,))
        self.embedding_scale = param(rngs, falling(0.20, 0.05), (layers,), (None,))
        constant = jax.nn.initializers.constant
        self.memory_scale = None if memory_scale is None else param(rngs, constant(memory_scale), (layers,), (None,))

    def of_layers(self) -> tuple:
        """The scalars, [L] each; None for that of a memory where it is not added to the stream."""
        return (
            self.residual_scale[...],
            self.embedding_scale[...],
            None if self.memory_scale is None else self.memory_scale[...],
        )

    @staticmethod
    def mix(of_layer: tuple, x_BTD, x0_BTD, memory_BTD):
        """What a layer's block reads: r x + e x_0, and its share of the memory (LRT)."""
        residual, embedding, memory = of_layer
        mixed_BTD = residual * x_BTD + embedding * x0_BTD  # in float32, like the scalars
        if memory is not None:
            mixed_BTD += memory * memory_BTD
        return mixed_BTD.astype(x_BTD.dtype)


class Smear(nnx.Module):
    """e_t + amount sigmoid(w e_t[:24]) e_{t-1} on normed embeddings (nanochat)."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        channels = min(SMEAR_CHANNELS, dim)
        self.gate = Linear(channels, 1, axes=(None, None), rngs=rngs, init=GATE_INIT)
        self.amount = param(rngs, jax.nn.initializers.zeros, (1,), (None,))

    def __call__(self, e_BTD, before_BTD):
        gate_BT1 = jax.nn.sigmoid(self.gate(e_BTD[..., :SMEAR_CHANNELS]))
        return (e_BTD + self.amount[...] * gate_BT1 * before_BTD).astype(e_BTD.dtype)


def starts(segment_ids_BT):
    """Where documents begin inside a row, bool [B,T]; None of None, where rows are one document."""
    if segment_ids_BT is None:
        return None
    return jnp.pad(segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1], ((0, 0), (1, 0)))


def shifted(x_BTD, starts_BT=None):
    """Each position's left neighbour; zero at the first, and where `starts_BT`."""
    before_BTD = jnp.pad(x_BTD[:, :-1], ((0, 0), (1, 0), (0, 0)))
    return before_BTD if starts_BT is None else jnp.where(starts_BT[..., None], 0, before_BTD)
