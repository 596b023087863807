"""One way to differentiate a chunked op: keep its inputs, compute the rest again."""

import functools
from collections.abc import Callable

import jax


def recomputed(function: Callable) -> Callable:
    """`function(chunk, *arrays, segment_ids)` with a VJP that saves its arguments alone.

    What a chunk would save, its C x C weights and the K x V state that enters it, is several times as large.
    """
    op = jax.custom_vjp(function, nondiff_argnums=(0,))

    def forward(chunk, *inputs):
        return function(chunk, *inputs), inputs

    def backward(chunk, inputs, cotangents):
        *differentiable, segment_ids_BT = inputs
        _, gradients_of = jax.vjp(lambda *xs: function(chunk, *xs, segment_ids_BT), *differentiable)
        return *gradients_of(cotangents), None

    op.defvjp(forward, backward)
    return functools.wraps(function)(op)
