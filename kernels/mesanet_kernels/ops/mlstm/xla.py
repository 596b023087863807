"""mLSTM in chunks and plain XLA: gated linear attention whose weights are stabilised (docs/mesa.md, "Chunks").

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

import jax
import jax.numpy as jnp

from mesanet_kernels.documents import state_resets
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mlstm.reference import STABILISER_FLOOR, normalise
from mesanet_kernels.recompute import recomputed


@recomputed
def mlstm_xla(chunk, q_BTHK, k_BTHK, v_BTHV, input_gate_BTH, forget_gate_BTH, state, segment_ids_BT):
    """Returns (o [B, T, H, V], final state (C, n, m)) with the arguments of `api.mlstm`."""
    cell_BHKV, normaliser_BHK, stabiliser_BH = state
    length = q_BTHK.shape[1]
    weights, m_NBHC, final_m_BH = _weights(input_gate_BTH, forget_gate_BTH, stabiliser_BH, segment_ids_BT, chunk=chunk)
    q_NBHCK, k_NBHCK, v_NBHCV = (chunks.to_chunks(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV))
    states_NBHKV, final_cell_BHKV = chunks.chunk_states(k_NBHCK, v_NBHCV, weights, cell_BHKV)
    read_NBHCV = chunks.read(q_NBHCK, k_NBHCK, v_NBHCV, weights, states_NBHKV)
    sum_NBHC, final_normaliser_BHK = _sums(q_NBHCK, k_NBHCK, weights, normaliser_BHK)
    scale = q_BTHK.shape[-1] ** -0.5
    o_NBHCV = normalise(scale * read_NBHCV, scale * sum_NBHC, m_NBHC)
    final = final_cell_BHKV, final_normaliser_BHK, final_m_BH
    return chunks.from_chunks(o_NBHCV, length).astype(v_BTHV.dtype), final


def _sums(q_NBHCK, k_NBHCK, weights, normaliser_BHK):
    """Returns n^T q of every token [N, B, H, C], and the last n [B, H, K].

    Nothing is rounded to the dtype of the inputs here: scores of both signs cancel, and the output is divided by what
    is left.
    """
    dtype = normaliser_BHK.dtype
    scores_NBHCC = chunks.product("nbhtk,nbhsk->nbhts", q_NBHCK, k_NBHCK, dtype) * weights.intra_NBHCC
    ones_NBHC1 = jnp.ones_like(weights.enter_NBHC)[..., None]
    states_NBH1K, final_BH1K = chunks.chunk_states(
        ones_NBHC1, k_NBHCK.astype(dtype), weights, normaliser_BHK[:, :, None]
    )
    before_NBHC = chunks.product("nbhtk,nbhk->nbht", q_NBHCK.astype(dtype), states_NBH1K[..., 0, :], dtype)
    return jnp.sum(scores_NBHCC, axis=-1) + weights.enter_NBHC * before_NBHC, final_BH1K[:, :, 0]


def _weights(input_gate_BTH, forget_gate_BTH, initial_m_BH, segment_ids_BT, *, chunk):
    """Returns the `ChunkWeights` times e^-m of token t, the stabilisers m [N, B, H, C], and the last one [B, H].

    m_t is a maximum over the past as the state is a sum over the past, so it is computed in chunks in the same way.
    """
    log_forget_BTH = jax.nn.log_sigmoid(forget_gate_BTH)
    between_NBHCC, enter_NBHC = chunks.log_decays(log_forget_BTH, segment_ids_BT, chunk=chunk)
    padding = (0, 0), (0, -input_gate_BTH.shape[1] % chunk), (0, 0)

    def gates(x_BTH):
        return chunks.to_chunks(jnp.pad(x_BTH, padding, constant_values=-jnp.inf), chunk)

    lower_BTH = lower_bounds(input_gate_BTH, log_forget_BTH, segment_ids_BT)
    inside_NBHC = jnp.max(between_NBHCC + gates(lower_BTH)[..., None, :], axis=-1)
    inside_NBHC = jnp.maximum(inside_NBHC, STABILISER_FLOOR)

    def carry_over(m_BH, inputs):
        inside_BH, enter_BH = inputs
        return jnp.maximum(inside_BH, enter_BH + m_BH), m_BH

    final_m_BH, m_NBH = jax.lax.scan(carry_over, initial_m_BH, (inside_NBHC[..., -1], enter_NBHC[..., -1]))
    entering_NBHC = enter_NBHC + m_NBH[..., None]
    m_NBHC = jnp.maximum(inside_NBHC, entering_NBHC)
    intra_NBHCC = jnp.exp(between_NBHCC + gates(input_gate_BTH)[..., None, :] - m_NBHC[..., None])
    return chunks.ChunkWeights(intra_NBHCC, jnp.exp(entering_NBHC - m_NBHC)), m_NBHC, final_m_BH


def lower_bounds(input_gate_BTH: jax.Array, log_forget_BTH: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Returns the lower bound that each token itself sets to m from this token on, [B, T, H].

    It is the input gate. The first token of a document adds the log forget gate, because a document starts from m = 0,
    which decays from its first token on.
    """
    starts_BT1 = state_resets(segment_ids_BT)[..., None]
    return jnp.where(starts_BT1, jnp.maximum(input_gate_BTH, log_forget_BTH), input_gate_BTH)
