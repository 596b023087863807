"""Gated linear attention with a scalar decay and its gradient, around any backend's kernels, on any mesh.

Kernels see whole chunks, and their `ChunkWeights` in place of gates and documents.

B batch, T time, C tokens of a chunk, H heads, K key size, V value size.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.partition import partitioned

AXES = ("BTHK", "BTHK", "BTHV", "BTH", "BTH", "BHKV", "BT")


class GatedLinearAttentionKernels(NamedTuple):
    """A backend, in chunks of `chunk` tokens; the time of all arrays is a multiple of it.

    weigh: (log_decay, beta, segment_ids) -> `ChunkWeights`; differentiated by jax.vjp.
    forward: (q, k, v, weights, initial state) -> (o, final state).
    backward: (q, k, v, weights, initial state, do, dfinal) -> cotangents of the first five.
    """

    chunk: int
    weigh: Callable
    forward: Callable
    backward: Callable


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_linear_attention_from_kernels(kernels: GatedLinearAttentionKernels, *inputs):
    """(o [B,T,H,V], final state [B,H,K,V]) of (q, k, v, log_decay, beta, state, segment_ids), as `api` says."""
    return partitioned(partial(_forward, kernels), inputs, axes=AXES, results=("BTHV", "BHKV"))


def _save_inputs(kernels, *inputs):
    return gated_linear_attention_from_kernels(kernels, *inputs), inputs


def _gradients(kernels, inputs, cotangents):
    arrays, axes = (*inputs, *cotangents), (*AXES, "BTHV", "BHKV")
    return *partitioned(partial(_backward, kernels), arrays, axes=axes, results=AXES[:-1]), None


gated_linear_attention_from_kernels.defvjp(_save_inputs, _gradients)


def _forward(kernels, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHKV, segment_ids_BT):
    weights = kernels.weigh(log_decay_BTH, beta_BTH, segment_ids_BT)
    whole = (chunks.pad_time(x, chunk=kernels.chunk) for x in (q_BTHK, k_BTHK, v_BTHV))
    o_BTHV, final_BHKV = kernels.forward(*whole, weights, state_BHKV)
    return o_BTHV[:, : q_BTHK.shape[1]], final_BHKV


def _backward(
    kernels, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHKV, segment_ids_BT, do_BTHV, dfinal_BHKV
):
    weights, gates_gradients = jax.vjp(lambda *gates: kernels.weigh(*gates, segment_ids_BT), log_decay_BTH, beta_BTH)
    *whole, do_BTHV = (chunks.pad_time(x, chunk=kernels.chunk) for x in (q_BTHK, k_BTHK, v_BTHV, do_BTHV))
    *found, dweights, dstate_BHKV = kernels.backward(*whole, weights, state_BHKV, do_BTHV, dfinal_BHKV)
    dq_BTHK, dk_BTHK, dv_BTHV = (x[:, : q_BTHK.shape[1]] for x in found)
    return dq_BTHK, dk_BTHK, dv_BTHV, *gates_gradients(dweights), dstate_BHKV
