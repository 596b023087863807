"""Differentiation that keeps only the inputs of an op and computes everything else again."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function` with a VJP that saves only its arguments.

    Automatic differentiation would also save the C x C weights of each chunk and the K x V state that enters it, which
    are several times as large.

    Args:
      function: a function of (chunk, *arrays, segment_ids), where `chunk` is static. There is no gradient of
        `segment_ids`.
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
