"""nanochat's residual block (karpathy/nanochat 92d63d4): weightless norms, attention with QK norm, ReLU^2 feed-forward.

    x += attention(norm(x));   x += W_2 relu(W_1 norm(x))^2

Training, prefill and decoding are the same call. They differ in where earlier keys and values come from, which
`Context.attend` and its cache decide.

B batch, T time, D model width, H query heads, G key/value heads, K head size, C gate channels, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from mesanet_jax.layers import Initializer, Linear, rms_normalize, rotary
from mesanet_jax.mesh import constrain
from mesanet_jax.models.block import ACTIVATION
from mesanet_jax.models.injection import Injection
from mesanet_jax.models.vocabulary import Vocabulary
from mesanet_jax.remat import MIXER_OUTPUT
from mesanet_jax.schema import Config
from mesanet_kernels import AttentionState, attention, attention_extend, attention_step, init_attention_state

zeros = jax.nn.initializers.zeros
GATE_INIT = jax.nn.initializers.uniform(0.02)  # U(0, 0.02)
VALUE_GATE_CHANNELS = 12


def uniform_init(scale: float = 1.0) -> Initializer:
    """U(-a, a) with a = scale sqrt(3 / fan-in): variance scale^2 / fan-in, without the outliers of a normal."""
    return jax.nn.initializers.variance_scaling(scale**2, "fan_in", "uniform")


class Context(NamedTuple):
    """What the blocks of one pass read besides the stream.

    Attributes:
      tokens_BT: the tokens, for value embeddings.
      positions_T: their positions in the row, for rotary embeddings.
      attend: (q_BTHK, k_BTGK, v_BTGK, cache, window) -> (o_BTHK, cache).
      memory_BTD: the memory that each position reads (Maglev, LRT); None for none.
    """

    tokens_BT: jax.Array
    positions_T: jax.Array
    attend: Callable
    memory_BTD: jax.Array | None = None


def attend_rows(segment_ids_BT: jax.Array | None) -> Callable:
    """`Context.attend` for whole rows, which need no cache. With ids None, a row is one document."""

    def attend(q_BTHK, k_BTGK, v_BTGK, cache, window):
        return attention(q_BTHK, k_BTGK, v_BTGK, window=window, segment_ids=segment_ids_BT), cache

    return attend


def attend_cached(q_BTHK, k_BTGK, v_BTGK, cache: AttentionState, window: int | None):
    """`Context.attend` for further tokens of a document whose earlier keys and values are in the cache."""
    if q_BTHK.shape[1] > 1:
        return attention_extend(q_BTHK, k_BTGK, v_BTGK, cache, window=window)
    o_BHK, cache = attention_step(q_BTHK[:, 0], k_BTGK[:, 0], v_BTGK[:, 0], cache, window=window)
    return o_BHK[:, None], cache


class ValueEmbedding(nnx.Module):
    """A value vector per token, from a table, times a gate per key/value head: 3 sigmoid(W a[:12]) table[token]."""

    def __init__(self, model: Config, kv_width: int, *, rngs: nnx.Rngs):
        vocabulary = Vocabulary.of(model)
        # The variance of a table is 1 / dim, as that of the value projection.
        init = jax.nn.initializers.variance_scaling(vocabulary.rows / model.dim, "fan_in", "uniform")
        self.value_embedding = vocabulary.table(kv_width, init, rngs=rngs)
        channels, heads = min(VALUE_GATE_CHANNELS, model.dim), kv_width // model.head_dim
        self.gate = Linear(channels, heads, axes=(None, "heads"), rngs=rngs, init=GATE_INIT)

    def __call__(self, a_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        """The values to add, [B,T,G,K], for the sublayer's normed input `a_BTD`."""
        gate_BTG1 = 3 * jax.nn.sigmoid(self.gate(a_BTD[..., :VALUE_GATE_CHANNELS]))[..., None]
        values_BTW = self.value_embedding[...].astype(a_BTD.dtype)[tokens_BT]
        return gate_BTG1 * values_BTW.reshape(*gate_BTG1.shape[:3], -1)


class NormedAttention(nnx.Module):
    """Attention whose rotated queries and keys are normed, with optional additions to its keys and values."""

    def __init__(self, model: Config, *, value_embedding: bool, memory: bool, rngs: nnx.Rngs):
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        self.rope_base, self.qk_scale = model.rope_base, model.qk_scale
        width, kv_width = model.heads * model.head_dim, (model.kv_heads or model.heads) * model.head_dim

        def linear(size: int) -> Linear:
            return Linear(model.dim, size, axes=("embed", "heads"), rngs=rngs, init=uniform_init())

        self.query, self.key, self.value = linear(width), linear(kv_width), linear(kv_width)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=zeros)
        self.values = ValueEmbedding(model, kv_width, rngs=rngs) if value_embedding else None
        self.injection = Injection(model, kv_width, rngs=rngs) if memory else None

    def __call__(self, x_BTD: jax.Array, context: Context, cache: Any, window: int | None) -> tuple[jax.Array, Any]:
        """What is added to the stream `x_BTD`, and the cache with these tokens in it."""
        q_BTHK, k_BTGK, v_BTGK = self._project(x_BTD, context)
        o_BTHK, cache = context.attend(q_BTHK, k_BTGK, v_BTGK, cache, window)
        return self.out(o_BTHK.reshape(*o_BTHK.shape[:2], -1)), cache

    def _project(self, x_BTD, context: Context):
        def rotate(y_BTHK):
            return rotary(y_BTHK, context.positions_T, base=self.rope_base)

        def finish(y_BTHK):
            return self.qk_scale * rms_normalize(rotate(y_BTHK), self.eps)

        a_BTD = rms_normalize(x_BTD, self.eps)
        linears = (self.query, self.key, self.value)
        q_BTHK, k_BTGK, v_BTGK = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in (f(a_BTD) for f in linears))
        if self.values is not None:
            v_BTGK += self.values(a_BTD, context.tokens_BT)
        if self.injection is None or context.memory_BTD is None:
            return finish(q_BTHK), finish(k_BTGK), v_BTGK
        k_BTGK, v_BTGK = self.injection(
            x_BTD,
            a_BTD,
            context.memory_BTD,
            k_BTGK,
            v_BTGK,
            finish=finish,
            rotate=lambda y_BTGK: self.qk_scale * rotate(y_BTGK),
        )
        return finish(q_BTHK), k_BTGK, v_BTGK

    def init_cache(self, batch: int, window: int | None, *, max_length: int, dtype: DTypeLike) -> AttentionState:
        """An empty ring buffer of `max_length` keys and values, or of `window` if that is smaller."""
        kv_heads = self.key.kernel.shape[-1] // self.head_dim
        slots = min(max_length, window or max_length)
        return init_attention_state(batch, kv_heads, slots, self.head_dim, self.head_dim, dtype)


class SquaredReLU(nnx.Module):
    """W_2 relu(W_1 x)^2 (Primer, arXiv 2109.08668)."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs):
        self.up = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs, init=uniform_init(0.4))
        self.down = Linear(hidden, dim, axes=("mlp", "embed"), rngs=rngs, init=zeros)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] -> [..., D]."""
        return self.down(jnp.square(jax.nn.relu(self.up(x))))


class NanochatBlock(nnx.Module):
    """The two sublayers. The residual scalars of a layer belong to the pass (`mesanet_jax.models.residual`).

    Args:
      value_embedding: whether the layer has value embeddings.
      memory: whether the layer has the parameters to read a memory.
    """

    def __init__(self, model: Config, *, value_embedding: bool, memory: bool, rngs: nnx.Rngs):
        self.eps = model.norm_eps
        self.attention = NormedAttention(model, value_embedding=value_embedding, memory=memory, rngs=rngs)
        self.mlp = SquaredReLU(model.dim, round(model.mlp_ratio * model.dim), rngs=rngs)

    def __call__(self, x_BTD: jax.Array, context: Context, cache: Any, window: int | None) -> tuple[jax.Array, Any]:
        """The stream after this block, and the cache with these tokens in it."""
        mixed_BTD, cache = self.attention(x_BTD, context, cache, window)
        x_BTD = constrain(x_BTD + checkpoint_name(mixed_BTD, MIXER_OUTPUT), ACTIVATION)
        return constrain(x_BTD + self.mlp(rms_normalize(x_BTD, self.eps)), ACTIVATION), cache
