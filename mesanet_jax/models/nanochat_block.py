"""nanochat's residual block (karpathy/nanochat 92d63d4): weightless norms, attention with QK norm, a ReLU^2 feed-forward.

    x += attention(norm(x));   x += W_2 relu(W_1 norm(x))^2

Training and every way of decoding are one call: what differs is where earlier keys and values come from, and that is
`Context.attend` and the cache that it is given.

B batch, T time, D model width, H query heads, G key/value heads, K head size, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from mesanet_jax.layers import Linear, param, rms_normalize, rotary
from mesanet_jax.mesh import constrain
from mesanet_jax.models.block import ACTIVATION
from mesanet_jax.models.injection import Injection
from mesanet_jax.remat import MIXER_OUTPUT
from mesanet_kernels import attention, attention_extend, attention_step, init_attention_state

zeros = jax.nn.initializers.zeros
GATE_INIT = jax.nn.initializers.uniform(0.02)  # U(0, 0.02)
VALUE_GATE_CHANNELS = 12


def uniform_init(scale: float = 1.0):
    """U(+-scale sqrt(3 / fan-in)): variance scale^2 / fan-in without a normal's outliers."""
    return jax.nn.initializers.variance_scaling(scale**2, "fan_in", "uniform")


class Context(NamedTuple):
    """What the blocks of one pass read beside the stream."""

    tokens_BT: jax.Array
    positions_T: jax.Array
    attend: Callable  # (q, k, v, cache, window) -> (o, cache)
    memory_BTD: jax.Array | None = None  # of the position before (maglev, lrt); None: nothing is injected


def attend_rows(segment_ids_BT):
    """`Context.attend` for whole rows, which need no cache; None: all of a row is one document."""

    def attend(q_BTHK, k_BTGK, v_BTGK, cache, window):
        return attention(q_BTHK, k_BTGK, v_BTGK, window=window, segment_ids=segment_ids_BT), cache

    return attend


def attend_cached(q_BTHK, k_BTGK, v_BTGK, cache, window):
    """`Context.attend` for further tokens of a text."""
    if q_BTHK.shape[1] > 1:
        return attention_extend(q_BTHK, k_BTGK, v_BTGK, cache, window=window)
    o_BHK, cache = attention_step(q_BTHK[:, 0], k_BTGK[:, 0], v_BTGK[:, 0], cache, window=window)
    return o_BHK[:, None], cache


class ValueEmbedding(nnx.Module):
    """Values that a token has by itself, through a gate a head: 3 sigmoid(W a[:12]) table[token], [B,T,G,K]."""

    def __init__(self, model, kv_width: int, *, rngs: nnx.Rngs):
        padded = -(-model.vocab_size // model.vocab_multiple) * model.vocab_multiple
        like_values = jax.nn.initializers.variance_scaling(padded / model.dim, "fan_in", "uniform")  # as c_v: 1 / dim
        self.value_embedding = param(rngs, like_values, (padded, kv_width), ("vocab", "embed"))
        channels, heads = min(VALUE_GATE_CHANNELS, model.dim), kv_width // model.head_dim
        self.gate = Linear(channels, heads, axes=(None, "heads"), rngs=rngs, init=GATE_INIT)

    def __call__(self, a_BTD, tokens_BT):
        gate_BTG1 = 3 * jax.nn.sigmoid(self.gate(a_BTD[..., :VALUE_GATE_CHANNELS]))[..., None]
        values_BTW = self.value_embedding[...].astype(a_BTD.dtype)[tokens_BT]
        return gate_BTG1 * values_BTW.reshape(*gate_BTG1.shape[:3], -1)


class NormedAttention(nnx.Module):
    """Attention whose rotated queries and keys have a fixed length, with what may be added to its keys and values."""

    def __init__(self, model, *, value_embedding: bool, injected: bool, rngs: nnx.Rngs):
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        self.rope_base, self.qk_scale = model.rope_base, model.qk_scale
        kv_width = (model.kv_heads or model.heads) * model.head_dim
        linear = lambda size: Linear(model.dim, size, axes=("embed", "heads"), rngs=rngs, init=uniform_init())
        width = model.heads * model.head_dim
        self.query, self.key, self.value = linear(width), linear(kv_width), linear(kv_width)
        self.out = Linear(width, model.dim, axes=("heads", "embed"), rngs=rngs, init=zeros)
        self.values = ValueEmbedding(model, kv_width, rngs=rngs) if value_embedding else None
        self.injection = Injection(model, kv_width, rngs=rngs) if injected else None

    def __call__(self, x_BTD, context: Context, cache, window: int | None):
        """(What is added to the stream x_BTD, the cache with these tokens)."""
        q_BTHK, k_BTGK, v_BTGK = self._project(x_BTD, context)
        o_BTHK, cache = context.attend(q_BTHK, k_BTGK, v_BTGK, cache, window)
        return self.out(o_BTHK.reshape(*o_BTHK.shape[:2], -1)), cache

    def _project(self, x_BTD, context: Context):
        a_BTD = rms_normalize(x_BTD, self.eps)
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        rotate = lambda y: rotary(y, context.positions_T, base=self.rope_base)
        finish = lambda y: self.qk_scale * rms_normalize(rotate(y), self.eps)
        q_BTHK, k_BTGK, v_BTGK = heads(self.query(a_BTD)), heads(self.key(a_BTD)), heads(self.value(a_BTD))
        if self.values is not None:
            v_BTGK += self.values(a_BTD, context.tokens_BT)
        if context.memory_BTD is None:
            return finish(q_BTHK), finish(k_BTGK), v_BTGK
        scaled_rotate = lambda y: self.qk_scale * rotate(y)
        k_BTGK, v_BTGK = self.injection(
            x_BTD, a_BTD, context.memory_BTD, k_BTGK, v_BTGK, finish=finish, rotate=scaled_rotate
        )
        return finish(q_BTHK), k_BTGK, v_BTGK

    def init_cache(self, batch: int, window: int | None, *, max_length: int, dtype):
        """A ring of `max_length` keys and values, or of the window where that is shorter."""
        kv_heads = self.key.kernel.shape[-1] // self.head_dim
        slots = min(max_length, window or max_length)
        return init_attention_state(batch, kv_heads, slots, self.head_dim, self.head_dim, dtype)


class SquaredReLU(nnx.Module):
    """W_2 relu(W_1 x)^2 (Primer, arXiv 2109.08668)."""

    def __init__(self, dim: int, hidden: int, *, rngs: nnx.Rngs):
        self.up = Linear(dim, hidden, axes=("embed", "mlp"), rngs=rngs, init=uniform_init(0.4))
        self.down = Linear(hidden, dim, axes=("mlp", "embed"), rngs=rngs, init=zeros)

    def __call__(self, x):
        return self.down(jnp.square(jax.nn.relu(self.up(x))))


class NanochatBlock(nnx.Module):
    """The two sublayers; the residual scalars of a layer are the pass's (`mesanet_jax.models.nanochat`)."""

    def __init__(self, model, *, value_embedding: bool, injected: bool, rngs: nnx.Rngs):
        self.eps = model.norm_eps
        self.attention = NormedAttention(model, value_embedding=value_embedding, injected=injected, rngs=rngs)
        self.mlp = SquaredReLU(model.dim, round(model.mlp_ratio * model.dim), rngs=rngs)

    def __call__(self, x_BTD, context: Context, cache: Any, window: int | None):
        mixed_BTD, cache = self.attention(x_BTD, context, cache, window)
        x_BTD = constrain(x_BTD + checkpoint_name(mixed_BTD, MIXER_OUTPUT), ACTIVATION)
        return constrain(x_BTD + self.mlp(rms_normalize(x_BTD, self.eps)), ACTIVATION), cache
