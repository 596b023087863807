"""Chunk-parallel form of a linear recurrence: what the ops with a matrix for a state share.

    S_t = gamma_t S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t

gamma is a scalar here; with one a key channel, the masked product is another (gated_linear_attention/vector.py).

The sequence is cut in N chunks of C tokens. Inside a chunk the recurrence is a masked product of
C x C (mesanet.md 1.5); between chunks only the state is carried, by a scan.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
Arrays in chunks lead with N so that the scan needs no transpose, and keep B and H apart so that a
mesh can split either without moving data.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.pairwise_decays import pairwise_values

# exp() of it is exactly zero in float32 and float64; clamping there keeps sums of decays finite (0 * inf is NaN).
LOG_DECAY_FLOOR = -1e4


class ChunkWeights(NamedTuple):
    """What a token sees: the tokens of its chunk and the state that enters the chunk.

    intra_NBHCC: weight of token s (last axis) in token t's state: beta_s * decay from s to t, 0 for s > t
      and across documents. Its last row is the weight of each token in the state that leaves the chunk.
    enter_NBHC: weight of the entering state in token t's state; 0 where a document started in between.
    """

    intra_NBHCC: jax.Array
    enter_NBHC: jax.Array


class LogDecays(NamedTuple):
    """Logarithms of what is left of a token, and of the state that enters the chunk; -inf: nothing.

    between_NBHCC: of token s (last axis) at token t: -inf for s > t and across documents.
    enter_NBHC: of the entering state at token t: -inf where a document started in between.
    """

    between_NBHCC: jax.Array
    enter_NBHC: jax.Array


def pick_chunk(chunk_size, length):
    """Tokens a chunk: 64 unless given (products of 64 rows keep matrix units busy), no more than `length` needs.

    A power of two, since chunks are computed by halves.
    """
    return 1 << (min(chunk_size or 64, length) - 1).bit_length()


def pad_time(x_BT, *, chunk, mode="constant"):
    """Pads axis 1 to a multiple of `chunk`. Zero keys, gates and log decays leave every state as it is."""
    missing = -x_BT.shape[1] % chunk
    if not missing:  # a pad of nothing still moves data where the array is sharded
        return x_BT
    padding = [(0, missing) if axis == 1 else (0, 0) for axis in range(x_BT.ndim)]
    return jnp.pad(x_BT, padding, mode=mode)


def to_chunks(x_BTH, chunk):
    """[B, T, H, ...] -> [N, B, H, C, ...], padding T with zeros."""
    x_BTH = pad_time(x_BTH, chunk=chunk)
    batch, time, *rest = x_BTH.shape
    x_BNCH = x_BTH.reshape(batch, time // chunk, chunk, *rest)
    return jnp.moveaxis(x_BNCH, (1, 3), (0, 2))


def from_chunks(x_NBHC, length):
    """[N, B, H, C, ...] -> [B, T, H, ...], the inverse of `to_chunks`."""
    x_BNCH = jnp.moveaxis(x_NBHC, (0, 2), (1, 3))
    batch, chunks, chunk, *rest = x_BNCH.shape
    return x_BNCH.reshape(batch, chunks * chunk, *rest)[:, :length]


def chunk_weights(log_decay_BTH, beta_BTH, segment_ids_BT, *, chunk):
    """The `ChunkWeights` of a sequence."""
    between_NBHCC, enter_NBHC = log_decays(log_decay_BTH, segment_ids_BT, chunk=chunk)
    return ChunkWeights(jnp.exp(between_NBHCC) * to_chunks(beta_BTH, chunk)[..., None, :], jnp.exp(enter_NBHC))


def log_decays(log_decay_BTH, segment_ids_BT, *, chunk):
    """The `LogDecays` of a sequence."""
    log_decay_NBHC1 = to_chunks(jnp.maximum(log_decay_BTH, LOG_DECAY_FLOOR), chunk)[..., None]
    visible_NB1CC, entered_NB1C = visibility(segment_ids_BT, chunk=chunk)
    between_NBHCC, since_NBHC1, _ = pairwise_values(
        jnp.zeros_like(log_decay_NBHC1[..., 0]), log_decay_NBHC1, lambda since, until, size: since + until.mT
    )
    return LogDecays(
        jnp.where(visible_NB1CC, between_NBHCC, -jnp.inf), jnp.where(entered_NB1C, since_NBHC1[..., 0], -jnp.inf)
    )


def visibility(segment_ids_BT, *, chunk):
    """Whether token t sees token s (last axis) of its chunk, [N, B, 1, C, C], and what came before it, [N, B, 1, C]."""
    # The padding belongs to the last document, whose state it must not reset.
    segment_NB1C = to_chunks(pad_time(segment_ids_BT, chunk=chunk, mode="edge")[:, :, None], chunk)
    previous_NB11 = jnp.concatenate([segment_NB1C[:1, ..., :1], segment_NB1C[:-1, ..., -1:]])
    same_NB1CC = segment_NB1C[..., :, None] == segment_NB1C[..., None, :]
    return jnp.tri(chunk, dtype=bool) & same_NB1CC, segment_NB1C == previous_NB11


def chunk_states(k_NBHCK, v_NBHCV, weights, initial_BHKV):
    """`carry_states` of a scalar decay."""
    leaving_NBHCK = k_NBHCK * weights.intra_NBHCC[..., -1, :, None]
    return carry_states(leaving_NBHCK.astype(k_NBHCK.dtype), v_NBHCV, weights.enter_NBHC[..., -1:], initial_BHKV)


def carry_states(leaving_NBHCK, v_NBHCV, carry_NBHK, initial_BHKV):
    """States entering each chunk, [N, B, H, K, V], and the state after the last, [B, H, K, V].

    leaving_NBHCK: keys, weighted by what is left of them at the end of their chunk.
    carry_NBHK: what a chunk leaves of the state that enters it; its last axis may be 1.
    """
    update_NBHKV = product("nbhck,nbhcv->nbhkv", leaving_NBHCK, v_NBHCV, initial_BHKV.dtype)

    def carry_over(state_BHKV, inputs):
        update_BHKV, carry_BHK = inputs
        return carry_BHK[..., None] * state_BHKV + update_BHKV, state_BHKV

    final_BHKV, states_NBHKV = jax.lax.scan(carry_over, initial_BHKV, (update_NBHKV, carry_NBHK))
    return states_NBHKV, final_BHKV


def read(q_NBHCK, k_NBHCK, v_NBHCV, weights, states_NBHKV):
    """o_t = S_t^T q_t for every token, [N, B, H, C, V], in the states' dtype; linear in q."""
    dtype, state_dtype = q_NBHCK.dtype, states_NBHKV.dtype
    scores_NBHCC = product("nbhtk,nbhsk->nbhts", q_NBHCK, k_NBHCK, state_dtype) * weights.intra_NBHCC
    inside_NBHCV = product("nbhts,nbhsv->nbhtv", scores_NBHCC.astype(dtype), v_NBHCV, state_dtype)
    before_NBHCV = product("nbhtk,nbhkv->nbhtv", q_NBHCK, states_NBHKV.astype(dtype), state_dtype)
    return inside_NBHCV + weights.enter_NBHC[..., None] * before_NBHCV


def product(equation, a, b, dtype):
    """An einsum accumulated in `dtype`. HIGHEST: float32 would otherwise run as TF32 or one bfloat16 pass."""
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
