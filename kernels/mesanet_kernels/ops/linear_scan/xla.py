"""The linear scan in chunks, in plain XLA: an associative scan inside a chunk, a loop over chunks.

The loop bounds the scratch memory and the number of passes over the data (6 levels of a tree instead of log2 T); the
tree keeps a device busy where one token at a time would not.

B batch, T time, N chunks, C tokens of a chunk, D channels.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels import chunks
from mesanet_kernels.checks import accumulation_dtype


@jax.custom_vjp
def linear_scan(x_BTD, a_BTD, state_BD, segment_ids_BT):
    """Returns (h [B,T,D], final state [B,D]); `api.linear_scan` says what each argument is."""
    return _forward(x_BTD, a_BTD, state_BD, segment_ids_BT)[0]


def _forward(x_BTD, a_BTD, state_BD, segment_ids_BT):
    dtype = accumulation_dtype(x_BTD, a_BTD)
    decay_BTD = jnp.where(_starts(segment_ids_BT), 0, a_BTD.astype(dtype))
    h_BTD = _scan(x_BTD.astype(dtype), decay_BTD, state_BD)
    templates = jnp.zeros((), x_BTD.dtype), jnp.zeros((), a_BTD.dtype)  # the dtypes of the gradients
    return (h_BTD.astype(x_BTD.dtype), h_BTD[:, -1]), (decay_BTD, h_BTD, state_BD, segment_ids_BT, templates)


def _backward(saved, cotangents):
    """The same recurrence from the last token to the first: g_t = dh_t + a_{t+1} g_{t+1}."""
    decay_BTD, h_BTD, state_BD, segment_ids_BT, (x, a) = saved
    dh_BTD, dfinal_BD = cotangents
    decay_after_BTD = jnp.concatenate([decay_BTD[:, 1:], jnp.ones_like(decay_BTD[:, :1])], axis=1)
    reverse = lambda z_BTD: jnp.flip(z_BTD, axis=1)
    g_BTD = reverse(_scan(reverse(dh_BTD.astype(h_BTD.dtype)), reverse(decay_after_BTD), dfinal_BD))
    before_BTD = jnp.concatenate([state_BD[:, None], h_BTD[:, :-1]], axis=1)
    da_BTD = jnp.where(_starts(segment_ids_BT), 0, g_BTD * before_BTD)
    return g_BTD.astype(x.dtype), da_BTD.astype(a.dtype), decay_BTD[:, 0] * g_BTD[:, 0], None


linear_scan.defvjp(_forward, _backward)


def _starts(segment_ids_BT):
    """Whether a token begins a document inside the row, [B, T, 1]."""
    return jnp.diff(segment_ids_BT, axis=1, prepend=segment_ids_BT[:, :1])[..., None] != 0


def _scan(x_BTD, a_BTD, state_BD):
    """h_t = a_t h_{t-1} + x_t, [B, T, D]."""
    length = x_BTD.shape[1]
    chunk = chunks.pick_chunk(None, length)

    def advance(state_BD, inputs):
        # Product of the decays since the chunk began, and the state of a chunk that began with zero.
        since_start_BCD, inside_BCD = jax.lax.associative_scan(_compose, inputs, axis=1)
        h_BCD = since_start_BCD * state_BD[:, None] + inside_BCD
        return h_BCD[:, -1], h_BCD

    _, h_NBCD = jax.lax.scan(advance, state_BD, (_split(a_BTD, chunk), _split(x_BTD, chunk)))
    h_BNCD = jnp.moveaxis(h_NBCD, 0, 1)
    return h_BNCD.reshape(x_BTD.shape[0], -1, x_BTD.shape[2])[:, :length]


def _split(x_BTD, chunk):
    """[B, T, D] -> [N, B, C, D], padding T with zeros."""
    x_BTD = chunks.pad_time(x_BTD, chunk=chunk)
    batch, time, channels = x_BTD.shape
    return jnp.moveaxis(x_BTD.reshape(batch, time // chunk, chunk, channels), 1, 0)


def _compose(earlier, later):
    """The map h -> a h + x of two spans of tokens, one after the other."""
    (a, x), (later_a, later_x) = earlier, later
    return a * later_a, later_a * x + later_x
