"""Gated linear attention with one decay per head around the kernels of one platform, with its gradient, on any mesh.

The kernels are given whole chunks, and `ChunkWeights` in place of gates and documents.

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
    """The kernels of one platform, as functions of arrays on one device whose time is a multiple of `chunk`.

    Attributes:
      chunk: tokens per chunk.
      weigh: (log_decay, beta, segment_ids) -> `ChunkWeights`, differentiable by `jax.vjp`.
      forward: (q, k, v, weights, initial state) -> (o, final state).
      backward: (q, k, v, weights, initial state, do, dfinal) -> the cotangents of the first five arguments.
    """

    chunk: int
    weigh: Callable
    forward: Callable
    backward: Callable


def _run(kernels: GatedLinearAttentionKernels, *inputs):
    """Returns (o [B, T, H, V], final state [B, H, K, V]) from (q, k, v, log_decay, beta, state, segment_ids)."""
    return partitioned(partial(_forward, kernels), inputs, axes=AXES, results=("BTHV", "BHKV"))


def _save_inputs(kernels, *inputs):
    """Returns the results, and the inputs for the backward pass."""
    return gated_linear_attention_from_kernels(kernels, *inputs), inputs


def _gradients(kernels, inputs, cotangents):
    """Returns the cotangents of the inputs."""
    arrays, axes = (*inputs, *cotangents), (*AXES, "BTHV", "BHKV")
    return *partitioned(partial(_backward, kernels), arrays, axes=axes, results=AXES[:-1]), None


gated_linear_attention_from_kernels = jax.custom_vjp(_run, nondiff_argnums=(0,))
gated_linear_attention_from_kernels.defvjp(_save_inputs, _gradients)


def _forward(kernels, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHKV, segment_ids_BT):
    """Returns (o, final state) on one device."""
    weights = kernels.weigh(log_decay_BTH, beta_BTH, segment_ids_BT)
    whole = (chunks.pad_time(x, chunk=kernels.chunk) for x in (q_BTHK, k_BTHK, v_BTHV))
    o_BTHV, final_BHKV = kernels.forward(*whole, weights, state_BHKV)
    return o_BTHV[:, : q_BTHK.shape[1]], final_BHKV


def _backward(
    kernels, q_BTHK, k_BTHK, v_BTHV, log_decay_BTH, beta_BTH, state_BHKV, segment_ids_BT, do_BTHV, dfinal_BHKV
):
    """Returns the cotangents of the floating inputs on one device."""
    weights, gates_gradients = jax.vjp(lambda *gates: kernels.weigh(*gates, segment_ids_BT), log_decay_BTH, beta_BTH)
    *whole, do_BTHV = (chunks.pad_time(x, chunk=kernels.chunk) for x in (q_BTHK, k_BTHK, v_BTHV, do_BTHV))
    *found, dweights, dstate_BHKV = kernels.backward(*whole, weights, state_BHKV, do_BTHV, dfinal_BHKV)
    dq_BTHK, dk_BTHK, dv_BTHV = (x[:, : q_BTHK.shape[1]] for x in found)
    return dq_BTHK, dk_BTHK, dv_BTHV, *gates_gradients(dweights), dstate_BHKV
