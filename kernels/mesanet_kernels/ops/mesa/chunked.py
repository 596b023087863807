"""Mesa in its chunk-parallel form with implicit gradients, around any solver (docs/mesa.md, "Chunks", "Its gradient").

    H_t = gamma_t H_{t-1} + beta_t k_t k_t^T    G_t = gamma_t G_{t-1} + beta_t v_t k_t^T
    q*_t = (H_t + Lambda)^{-1} q_t              o_t = G_t q*_t

Both states are updated and read as those of one linear attention with the values [v, k], W = V + K columns.

B batch, T time, N chunks, C tokens of a chunk, H heads, K key size, V value size, W = V + K.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from mesanet_kernels.checks import accumulation_dtype
from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.ops.mesa.options import MESA_SOLUTION


class ChunkedStates(NamedTuple):
    """What the operators H_t + Lambda and the readouts G_t of all tokens consist of.

    Attributes:
      k_NBHCK, v_NBHCV: keys and values in the accumulation dtype.
      h_kk_NBHKK, h_kv_NBHKV: the states that enter each chunk.
    """

    k_NBHCK: jax.Array
    v_NBHCV: jax.Array
    weights: chunks.ChunkWeights
    h_kk_NBHKK: jax.Array
    h_kv_NBHKV: jax.Array
    lam_HK: jax.Array


def _mesa(solve: Callable, options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """Returns (o [B, T, H, V], (h_kk, h_kv), iterations [B, T, H]) with the arguments of `api.mesa`.

    Args:
      solve: (options, ChunkedStates, rhs_NBHCK) -> `Solution` of all the systems (H_t + Lambda) x_t = rhs_t.
      options: `MesaOptions`.
    """
    return _forward(solve, options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT)[0]


def _forward(solve, options, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT):
    """Returns the results of `_mesa`, and what the backward pass needs."""
    length, dtype = q_BTHK.shape[1], accumulation_dtype(q_BTHK, k_BTHK, v_BTHV)
    chunked, final_state = _prepare(
        options, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state, segment_ids_BT, lam_HK=lam_HK
    )
    solution = solve(options, chunked, chunks.to_chunks(q_BTHK.astype(dtype), options.chunk))
    # Named so that a rematerialisation policy can keep the one value that is expensive to recompute.
    solution_NBHCK = checkpoint_name(solution.x_RK, MESA_SOLUTION)
    o_NBHCV = _read_values(chunked, solution_NBHCK)
    output = (
        chunks.from_chunks(o_NBHCV, length).astype(v_BTHV.dtype),
        final_state,
        chunks.from_chunks(solution.iterations_R, length),
    )
    # Saved are the inputs except q, and q*. The states are recomputed: each head and chunk has K (K + V) numbers of
    # them.
    return output, (
        k_BTHK,
        v_BTHV,
        log_decay_BTH,
        beta_BTH,
        lam_HK,
        state,
        segment_ids_BT,
        chunks.from_chunks(solution_NBHCK, length),
    )


def _backward(solve, options, saved, cotangents):
    """Returns the gradients of all arguments (docs/mesa.md, "Its gradient").

    With e* = (H + Lambda)^{-1} dq*: dq = e*, dlambda = -sum q* e*, and the others are the gradients of
    sum(do . G q*) - sum(e* . H q*) at fixed q* and e*.
    """
    k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, lam_HK, state, segment_ids_BT, solution_BTHK = saved
    do_BTHV, dfinal_state, _ = cotangents
    length, dtype = k_BTHK.shape[1], solution_BTHK.dtype
    solution_NBHCK = chunks.to_chunks(solution_BTHK, options.chunk)

    def readouts(k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state):
        """Returns what depends on these arguments at fixed q*: (G q*, H q*, final state), and the states."""
        chunked, final_state = _prepare(
            options, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state, segment_ids_BT, lam_HK=lam_HK
        )
        return (_read_values(chunked, solution_NBHCK), read_keys(chunked, solution_NBHCK), final_state), chunked

    _, gradients_of, chunked = jax.vjp(readouts, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state, has_aux=True)
    do_NBHCV = chunks.to_chunks(do_BTHV.astype(dtype), options.chunk)
    (dsolution_NBHCK,) = jax.linear_transpose(partial(_read_values, chunked), solution_NBHCK)(do_NBHCV)
    e_NBHCK = solve(options, chunked, dsolution_NBHCK).x_RK

    dk, dv, dlog_decay, dbeta, dstate = gradients_of((do_NBHCV, -e_NBHCK, dfinal_state))
    dq_BTHK = chunks.from_chunks(e_NBHCK, length).astype(k_BTHK.dtype)
    dlam_HK = -jnp.sum(solution_NBHCK * e_NBHCK, axis=(0, 1, 3)).astype(lam_HK.dtype)
    return dq_BTHK, dk, dv, dlog_decay, dbeta, dlam_HK, dstate, None


mesa_chunked = jax.custom_vjp(_mesa, nondiff_argnums=(0, 1))
mesa_chunked.defvjp(_forward, _backward)


def _prepare(options, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state, segment_ids_BT, *, lam_HK):
    """Returns the `ChunkedStates` of a sequence, and its final (h_kk, h_kv)."""
    dtype, value_size = accumulation_dtype(k_BTHK, v_BTHV), v_BTHV.shape[-1]
    h_kk_BHKK, h_kv_BHKV = state
    weights = chunks.chunk_weights(log_decay_BTH, beta_BTH, segment_ids_BT, chunk=options.chunk)
    k_NBHCK, v_NBHCV = (chunks.to_chunks(x.astype(dtype), options.chunk) for x in (k_BTHK, v_BTHV))
    values_NBHCW = jnp.concatenate([v_NBHCV, k_NBHCK], axis=-1)
    # Transposed because `read` returns S^T p. H is symmetric, so this only matters for the gradient of h_kk.
    initial_BHKW = jnp.concatenate([h_kv_BHKV, h_kk_BHKK.mT], axis=-1)
    states_NBHKW, final_BHKW = chunks.chunk_states(k_NBHCK, values_NBHCW, weights, initial_BHKW)
    chunked = ChunkedStates(
        k_NBHCK, v_NBHCV, weights, states_NBHKW[..., value_size:], states_NBHKW[..., :value_size], lam_HK.astype(dtype)
    )
    return chunked, (final_BHKW[..., value_size:].mT, final_BHKW[..., :value_size])


def diagonal(chunked: ChunkedStates) -> jax.Array:
    """Returns the diagonal of every H_t + Lambda, [N, B, H, C, K]."""
    k_NBHCK, weights = chunked.k_NBHCK, chunked.weights
    inside_NBHCK = chunks.product("nbhts,nbhsk->nbhtk", weights.intra_NBHCC, k_NBHCK * k_NBHCK, k_NBHCK.dtype)
    before_NBHK = jnp.diagonal(chunked.h_kk_NBHKK, axis1=-2, axis2=-1)
    return inside_NBHCK + weights.enter_NBHC[..., None] * before_NBHK[..., None, :] + chunked.lam_HK[:, None, :]


def read_keys(chunked: ChunkedStates, p_NBHCK: jax.Array) -> jax.Array:
    """Returns H_t p_t for every token, [N, B, H, C, K]."""
    return chunks.read(p_NBHCK, chunked.k_NBHCK, chunked.k_NBHCK, chunked.weights, chunked.h_kk_NBHKK)


def _read_values(chunked, p_NBHCK):
    """Returns G_t p_t for every token, [N, B, H, C, V]."""
    return chunks.read(p_NBHCK, chunked.k_NBHCK, chunked.v_NBHCV, chunked.weights, chunked.h_kv_NBHKV)
