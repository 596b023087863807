"""Rows whose time is split over devices: each holds one span of every row.

A recurrent op does its part in three steps (`recurrent`). Each device says what its span does to any state that enters it
(`Memory.summarise`); all tell each other; each passes the initial state on through the spans before its own
(`Memory.advance`), and runs on its own span from there. What travels is of the size of the states, however long the row.

Time alone is split by hand: inside, the compiler goes on splitting batch and heads.

B batch, T time (inside of `split`, of a span), S spans, H heads, K key size; X any further axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import LOG_DECAY_FLOOR
from mesanet_kernels.partition import time_axes


class Memory(NamedTuple):
    """What a span of tokens does to the state of a recurrent op.

    summarise: (*rows, *whole, segment_ids) -> a tree of arrays that says so for any state.
    advance: (summary, state of the first token's document) -> the state after the span.
    """

    summarise: Callable
    advance: Callable


def recurrent(run: Callable, memory: Memory, rows: Sequence, whole: Sequence, state: Any, segment_ids_BT):
    """`run(*rows, *whole, state, segment_ids)`, a recurrent op, with time split as the mesh of the context splits it.

    Args:
      run: returns a tree of arrays [B, T, ...] and the final state.
      rows: arrays [B, T, ...]. whole: arrays without time.
      state: a tree of arrays [B, ...], all zero where a document starts.
    """
    axes = time_axes(segment_ids_BT.shape[1])
    if not axes:
        return run(*rows, *whole, state, segment_ids_BT)

    def on_span(rows, whole):
        *rows, segment_ids_BT = rows
        *whole, state = whole
        summary = memory.summarise(*rows, *whole, segment_ids_BT)
        entering, final = _pass_on(memory.advance, summary, state, segment_ids_BT, axes)
        outputs, _ = run(*rows, *whole, entering, segment_ids_BT)
        return outputs, final

    return split(on_span, (*rows, segment_ids_BT), (*whole, state), axes=axes)


def span_length(length: int) -> int:
    """The tokens of a row of `length` that a device holds."""
    mesh = jax.sharding.get_abstract_mesh()
    return length // math.prod(mesh.shape[axis] for axis in time_axes(length))


def by_token(run: Callable, rows: Sequence, whole: Sequence):
    """`run(*rows, *whole)`, in which no token looks at another, with time split: an array [B, T, ...]."""
    axes = time_axes(rows[0].shape[1])
    if not axes:
        return run(*rows, *whole)
    return split(lambda rows, whole: (run(*rows, *whole), ()), rows, whole, axes=axes)[0]


def split(call: Callable, rows: Any, whole: Any, *, axes: tuple[str, ...]):
    """`call(rows, whole)` -> (rows, whole) on each device's span.

    Args:
      rows: a tree of arrays [B, T, ...]. whole: a tree of arrays without time, the same on every span.
      axes: of the mesh, from `time_axes`.
    """
    span = jax.P(None, axes)
    mapped = jax.shard_map(
        call,
        in_specs=(span, jax.P()),
        out_specs=(span, jax.P()),
        axis_names=set(axes),
        check_vma=False,  # kernels' results have no such types
    )
    return mapped(rows, whole)


def _pass_on(advance: Callable, summary, state, segment_ids_BT, axes):
    """The state that enters this device's span, and the one after the last span."""
    spans = jax.lax.all_gather((summary, segment_ids_BT[:, 0], segment_ids_BT[:, -1]), axes)

    def over_span(carried, span):
        state, last_B = carried
        summary, first_B, next_last_B = span
        state = jax.tree.map(lambda x: where_rows(first_B == last_B, x, 0), state)
        return (advance(summary, state), next_last_B), state

    of_first_document_B = spans[1][0]
    (final, _), entering_S = jax.lax.scan(over_span, (state, of_first_document_B), spans)
    return jax.tree.map(lambda x_S: x_S[jax.lax.axis_index(axes)], entering_S), final


def where_rows(condition_B, x_BX, y):
    """`jnp.where` with a condition a row."""
    return jnp.where(condition_B.reshape(-1, *(1,) * (x_BX.ndim - 1)), x_BX, y)


def log_remains(log_decay_BTX, segment_ids_BT):
    """Logarithms of what is left when the span ends: of each token [B, T, X], of the state that enters [B, X]; -inf: nothing.

    Every sum has the terms of its own tokens alone: a difference of two would lose small decays behind large ones.
    """
    log_decay_BTX = jnp.maximum(log_decay_BTX, LOG_DECAY_FLOOR)
    since_BTX = jax.lax.cumsum(log_decay_BTX, axis=1, reverse=True)
    until_BTX = jnp.concatenate([since_BTX[:, 1:], jnp.zeros_like(since_BTX[:, :1])], axis=1)
    of_last_BT = segment_ids_BT == segment_ids_BT[:, -1:]
    until_BTX = jnp.where(of_last_BT.reshape(*of_last_BT.shape, *(1,) * (until_BTX.ndim - 2)), until_BTX, -jnp.inf)
    return until_BTX, where_rows(of_last_BT[:, 0], since_BTX[:, 0], -jnp.inf)


def decayed(summary, state):
    """`Memory.advance` of states [B, H, K, ...] that decay: a summary is (log of what remains, what was written)."""
    remains_BHK, written = summary
    return jax.tree.map(lambda x, added: jnp.exp(remains_BHK)[..., None] * x + added, state, written)
