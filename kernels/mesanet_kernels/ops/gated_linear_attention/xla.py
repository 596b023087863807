"""Gated linear attention in chunks and plain XLA, with one decay per head or per key channel (docs/mesa.md, "Chunks").

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size.
"""

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.gated_linear_attention import vector
from mesanet_kernels.recompute import recomputed


@recomputed
def gated_linear_attention_xla(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay, beta_BTH, state_BHKV, segment_ids_BT):
    """Returns (o [B, T, H, V], final state [B, H, K, V]) with the arguments of `api.gated_linear_attention`."""
    run = vector.gated_linear_attention_vector if log_decay.ndim == 4 else _scalar_decay
    return run(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay, beta_BTH, state_BHKV, segment_ids_BT)


def _scalar_decay(chunk, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHKV, segment_ids_BT):
    """Returns (o, final state) with one decay per head."""
    length = q_BTHK.shape[1]
    weights = chunks.chunk_weights(log_decay_BTH, beta_BTH, segment_ids_BT, chunk=chunk)
    q_NBHCK, k_NBHCK, v_NBHCV = (chunks.to_chunks(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV))
    states_NBHKV, final_BHKV = chunks.chunk_states(k_NBHCK, v_NBHCV, weights, state_BHKV)
    o_NBHCV = chunks.read(q_NBHCK, k_NBHCK, v_NBHCV, weights, states_NBHKV)
    return chunks.from_chunks(o_NBHCV, length).astype(v_BTHV.dtype), final_BHKV
