"""The chunk-parallel form of a linear recurrence whose state is a matrix, in plain XLA (docs/mesa.md, "Chunks").

    S_t = gamma_t S_{t-1} + beta_t k_t v_t^T          o_t = S_t^T q_t

Here gamma is one scalar per head and token. With one per key channel, only the masked product differs
(gated_linear_attention/vector.py).

The sequence is cut into N chunks of C tokens. Inside a chunk the recurrence becomes a masked product of C x C; between
chunks only the state is carried, by a scan.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
Chunked arrays have N as their first axis, so the scan over chunks needs no transposition. B and H stay separate axes,
so that a mesh can split either without moving data.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from mesanet_kernels.linear_recurrence.pairwise_decays import pairwise_values

# The exponential of this is exactly 0 in float32 and float64. Log decays are clamped here so that their sums stay
# finite: a decay of 0 would otherwise be -inf, and 0 * inf is NaN.
LOG_DECAY_FLOOR = -1e4


class ChunkWeights(NamedTuple):
    """How much each token, and the state that enters the chunk, counts in the state of a token of the chunk.

    Attributes:
      intra_NBHCC: the weight of token s (last axis) in the state of token t: beta_s times the decay from s to t. It is
        0 for s > t and where s and t belong to different documents.
      enter_NBHC: the weight of the entering state in the state of token t; 0 where a document has started in between.
    """

    intra_NBHCC: jax.Array
    enter_NBHC: jax.Array

    @property
    def leave_NBHC(self) -> jax.Array:
        """The weight of each token in the state that leaves the chunk: the last row of `intra_NBHCC`."""
        return self.intra_NBHCC[..., -1, :]

    @property
    def carry_NBH(self) -> jax.Array:
        """The weight of the entering state in the state that leaves the chunk: the last entry of `enter_NBHC`."""
        return self.enter_NBHC[..., -1]


class LogDecays(NamedTuple):
    """Logarithms of decays within a chunk; -inf where nothing is left.

    Attributes:
      between_NBHCC: the log decay from token s (last axis) to token t; -inf for s > t and across documents.
      enter_NBHC: the log decay of the entering state up to token t; -inf where a document has started in between.
    """

    between_NBHCC: jax.Array
    enter_NBHC: jax.Array


def pick_chunk(chunk_size: int | None, length: int) -> int:
    """Returns the tokens per chunk: `chunk_size` or 64, at most `length`, rounded up to a power of two.

    Products with 64 rows keep matrix units busy. A power of two is needed because decays are computed by merging pairs
    of blocks (pairwise_decays.py).
    """
    return 1 << (min(chunk_size or 64, length) - 1).bit_length()


def pad_time(x_BT: jax.Array, *, chunk: int, mode: str = "constant") -> jax.Array:
    """Pads axis 1 to a multiple of `chunk`. Zero keys, gates and log decays leave every state unchanged."""
    missing = -x_BT.shape[1] % chunk
    if not missing:  # even an empty pad would move data if the array is sharded
        return x_BT
    padding = [(0, missing) if axis == 1 else (0, 0) for axis in range(x_BT.ndim)]
    return jnp.pad(x_BT, padding, mode=mode)


def to_chunks(x_BTH: jax.Array, chunk: int) -> jax.Array:
    """Reshapes [B, T, H, ...] to [N, B, H, C, ...], padding T with zeros."""
    x_BTH = pad_time(x_BTH, chunk=chunk)
    batch, time, *rest = x_BTH.shape
    x_BNCH = x_BTH.reshape(batch, time // chunk, chunk, *rest)
    return jnp.moveaxis(x_BNCH, (1, 3), (0, 2))


def from_chunks(x_NBHC: jax.Array, length: int) -> jax.Array:
    """Reshapes [N, B, H, C, ...] to [B, T, H, ...] with T = `length`; undoes `to_chunks`."""
    x_BNCH = jnp.moveaxis(x_NBHC, (0, 2), (1, 3))
    batch, chunks, chunk, *rest = x_BNCH.shape
    return x_BNCH.reshape(batch, chunks * chunk, *rest)[:, :length]


def chunk_weights(log_decay_BTH, beta_BTH, segment_ids_BT, *, chunk: int) -> ChunkWeights:
    """Returns the `ChunkWeights` of a sequence."""
    between_NBHCC, enter_NBHC = log_decays(log_decay_BTH, segment_ids_BT, chunk=chunk)
    return ChunkWeights(jnp.exp(between_NBHCC) * to_chunks(beta_BTH, chunk)[..., None, :], jnp.exp(enter_NBHC))


def log_decays(log_decay_BTH, segment_ids_BT, *, chunk: int) -> LogDecays:
    """Returns the `LogDecays` of a sequence."""
    log_decay_NBHC1 = to_chunks(jnp.maximum(log_decay_BTH, LOG_DECAY_FLOOR), chunk)[..., None]
    visible_NB1CC, entered_NB1C = visibility(segment_ids_BT, chunk=chunk)
    between_NBHCC, since_NBHC1, _ = pairwise_values(
        jnp.zeros_like(log_decay_NBHC1[..., 0]), log_decay_NBHC1, lambda since, until, size: since + until.mT
    )
    return LogDecays(
        jnp.where(visible_NB1CC, between_NBHCC, -jnp.inf), jnp.where(entered_NB1C, since_NBHC1[..., 0], -jnp.inf)
    )


def visibility(segment_ids_BT, *, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Returns what a token may see, given its document.

    Returns:
      (bool [N, B, 1, C, C]: whether token t sees token s (last axis) of its chunk;
      bool [N, B, 1, C]: whether token t sees the state that enters the chunk).
    """
    # The padding repeats the last document's number: it must not reset that document's state.
    segment_NB1C = to_chunks(pad_time(segment_ids_BT, chunk=chunk, mode="edge")[:, :, None], chunk)
    previous_NB11 = jnp.concatenate([segment_NB1C[:1, ..., :1], segment_NB1C[:-1, ..., -1:]])
    same_NB1CC = segment_NB1C[..., :, None] == segment_NB1C[..., None, :]
    return jnp.tri(chunk, dtype=bool) & same_NB1CC, segment_NB1C == previous_NB11


def chunk_states(k_NBHCK, v_NBHCV, weights: ChunkWeights, initial_BHKV) -> tuple[jax.Array, jax.Array]:
    """Returns what `carry_states` does, for one decay per head."""
    leaving_NBHCK = k_NBHCK * weights.leave_NBHC[..., None]
    return carry_states(leaving_NBHCK.astype(k_NBHCK.dtype), v_NBHCV, weights.enter_NBHC[..., -1:], initial_BHKV)


def carry_states(leaving_NBHCK, v_NBHCV, carry_NBHK, initial_BHKV) -> tuple[jax.Array, jax.Array]:
    """Carries the state from chunk to chunk.

    Args:
      leaving_NBHCK: keys, weighted by what is left of them at the end of their chunk.
      v_NBHCV: values.
      carry_NBHK: the factor by which a chunk multiplies the state that enters it; the last axis may be 1.
      initial_BHKV: the state that enters the first chunk; its dtype is that of all sums.

    Returns:
      (the states that enter each chunk [N, B, H, K, V], the state after the last chunk [B, H, K, V]).
    """
    update_NBHKV = product("nbhck,nbhcv->nbhkv", leaving_NBHCK, v_NBHCV, initial_BHKV.dtype)

    def carry_over(state_BHKV, inputs):
        """Returns the state that leaves a chunk, and the one that entered it."""
        update_BHKV, carry_BHK = inputs
        return carry_BHK[..., None] * state_BHKV + update_BHKV, state_BHKV

    final_BHKV, states_NBHKV = jax.lax.scan(carry_over, initial_BHKV, (update_NBHKV, carry_NBHK))
    return states_NBHKV, final_BHKV


def read(q_NBHCK, k_NBHCK, v_NBHCV, weights: ChunkWeights, states_NBHKV) -> jax.Array:
    """Returns o_t = S_t^T q_t for every token, [N, B, H, C, V], in the dtype of the states. It is linear in q."""
    dtype, state_dtype = q_NBHCK.dtype, states_NBHKV.dtype
    scores_NBHCC = product("nbhtk,nbhsk->nbhts", q_NBHCK, k_NBHCK, state_dtype) * weights.intra_NBHCC
    inside_NBHCV = product("nbhts,nbhsv->nbhtv", scores_NBHCC.astype(dtype), v_NBHCV, state_dtype)
    before_NBHCV = product("nbhtk,nbhkv->nbhtv", q_NBHCK, states_NBHKV.astype(dtype), state_dtype)
    return inside_NBHCV + weights.enter_NBHC[..., None] * before_NBHCV


def product(equation: str, a: jax.Array, b: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns an einsum of two arrays, accumulated in `dtype`.

    The precision is HIGHEST because float32 products would otherwise run as TF32 on GPUs and as one bfloat16 pass on
    TPUs.
    """
    return jnp.einsum(equation, a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=dtype)
