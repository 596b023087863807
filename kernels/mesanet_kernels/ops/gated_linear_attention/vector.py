"""Gated linear attention with one decay per key channel, in chunks and plain XLA (GLA, arXiv 2312.06635, section 4.3).

The decay from token s to token t is inside the sum over channels of q_t . k_s, so it has to be split between the two
factors. The chunk is built up from pairs of blocks, and the decay is split at the boundary between the two blocks of a
pair (pairwise_decays.py), which keeps both exponents at most 0:

    score(t, s) = sum_k (q_tk e^(since_tk)) (k_sk e^(until_sk))

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, P pairs of blocks, S tokens of a
block.
"""

import jax.numpy as jnp

from mesanet_kernels.linear_recurrence import chunks, pairwise_decays

# The fewest rows of a matrix product. With fewer, a matrix unit would mostly compute padding; an elementwise product
# and a sum over channels, which the compiler fuses, is used instead.
SMALLEST_PRODUCT = 8


def gated_linear_attention_vector(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH, state_BHKV, segment_ids_BT):
    """Returns (o [B, T, H, V], final state [B, H, K, V]) with the arguments of `api.gated_linear_attention`."""
    length, dtype, state_dtype = q_BTHK.shape[1], q_BTHK.dtype, state_BHKV.dtype
    log_decay_BTHK = jnp.maximum(log_decay_BTHK, chunks.LOG_DECAY_FLOOR)
    q_NBHCK, k_NBHCK, v_NBHCV, log_decay_NBHCK, beta_NBHC = (
        chunks.to_chunks(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV, log_decay_BTHK, beta_BTH)
    )
    visible_NB1CC, entered_NB1C = chunks.visibility(segment_ids_BT, chunk=chunk)

    scores_NBHCC, since_NBHCK, until_NBHCK = _scores(q_NBHCK, k_NBHCK, log_decay_NBHCK)
    scores_NBHCC = jnp.where(visible_NB1CC, scores_NBHCC * beta_NBHC[..., None, :], 0)
    enter_NBHCK = jnp.where(entered_NB1C[..., None], jnp.exp(since_NBHCK), 0)
    leave_NBHC1 = jnp.where(visible_NB1CC[..., -1, :], beta_NBHC, 0)[..., None]
    leaving_NBHCK = (leave_NBHC1 * jnp.exp(until_NBHCK) * k_NBHCK).astype(dtype)
    states_NBHKV, final_BHKV = chunks.carry_states(leaving_NBHCK, v_NBHCV, enter_NBHCK[..., -1, :], state_BHKV)

    entering_NBHCK = (enter_NBHCK * q_NBHCK).astype(dtype)
    inside_NBHCV = chunks.product("nbhts,nbhsv->nbhtv", scores_NBHCC.astype(dtype), v_NBHCV, state_dtype)
    before_NBHCV = chunks.product("nbhtk,nbhkv->nbhtv", entering_NBHCK, states_NBHKV.astype(dtype), state_dtype)
    return chunks.from_chunks(inside_NBHCV + before_NBHCV, length).astype(v_BTHV.dtype), final_BHKV


def _scores(q_NBHCK, k_NBHCK, log_decay_NBHCK):
    """Returns q_t . k_s with the decay between them [N, B, H, C, C], and the log decays since and until each token.

    Values above the diagonal are arbitrary.
    """
    dtype = q_NBHCK.dtype

    def across(since_NBHPSK, until_NBHPSK, size):
        """Returns the scores of the second block's queries with the first block's keys."""
        q_NBHPSK = jnp.exp(since_NBHPSK) * pairwise_decays.split_pairs(q_NBHCK, size)[1]
        k_NBHPSK = jnp.exp(until_NBHPSK) * pairwise_decays.split_pairs(k_NBHCK, size)[0]
        if size < SMALLEST_PRODUCT:
            return jnp.sum(q_NBHPSK[..., :, None, :] * k_NBHPSK[..., None, :, :], axis=-1)
        q_NBHPSK, k_NBHPSK = q_NBHPSK.astype(dtype), k_NBHPSK.astype(dtype)
        return chunks.product("nbhptk,nbhpsk->nbhpts", q_NBHPSK, k_NBHPSK, since_NBHPSK.dtype)

    diagonal_NBHC = jnp.sum(q_NBHCK.astype(log_decay_NBHCK.dtype) * k_NBHCK, axis=-1)
    return pairwise_decays.pairwise_values(diagonal_NBHC, log_decay_NBHCK, across)
