"""Ops whose rows are split over devices along time: each device holds one shard of the sequence.

A recurrent op runs in three steps (`run_recurrent_op`). Each device summarises how its shard changes any state that
enters it (`ShardTransition.summarise`). An all-gather exchanges the summaries. Each device then carries the initial
state through the shards before its own (`ShardTransition.advance`), and runs the op on its shard from the state that
results. Only data of the size of the states is sent, whatever the length of the row.

Only time is split by hand. The compiler still splits batch and heads.

B batch, T time (of one shard, inside `map_shards`), S shards, H heads, K key size; X any further axes.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mesanet_kernels.linear_recurrence.chunks import LOG_DECAY_FLOOR
from mesanet_kernels.partition import time_axes


class ShardTransition(NamedTuple):
    """How a shard of the sequence changes the state of a recurrent op.

    Attributes:
      summarise: a function of (*per_token, *shared, segment_ids) of one shard, as in `run_recurrent_op`. It returns a
        tree of arrays, the summary, that determines the state after the shard for any state before it.
      advance: a function of (summary, state), where the state belongs to the document of the shard's first token. It
        returns the state after the shard.
    """

    summarise: Callable[..., Any]
    advance: Callable[[Any, Any], Any]


def run_recurrent_op(
    run: Callable[..., Any],
    transition: ShardTransition,
    per_token: Sequence[jax.Array],
    shared: Sequence[jax.Array],
    state: Any,
    segment_ids_BT: jax.Array,
) -> tuple[Any, Any]:
    """Returns `run(*per_token, *shared, state, segment_ids)`, with time split as the current mesh splits it.

    Args:
      run: the op; returns (a tree of arrays [B, T, ...], the final state).
      transition: how a shard of the sequence changes the state.
      per_token: arrays [B, T, ...].
      shared: arrays without a time axis.
      state: the initial state, a tree of arrays [B, ...]; a document that starts inside a row starts from zeros.
      segment_ids_BT: the document of each token.
    """
    axes = time_axes(segment_ids_BT.shape[1])
    if not axes:
        return run(*per_token, *shared, state, segment_ids_BT)

    def run_shard(per_token, shared):
        *per_token, segment_ids_BT = per_token
        *shared, state = shared
        summary = transition.summarise(*per_token, *shared, segment_ids_BT)
        entering, final = _carry_through_shards(transition.advance, summary, state, segment_ids_BT, axes)
        outputs, _ = run(*per_token, *shared, entering, segment_ids_BT)
        return outputs, final

    return map_shards(run_shard, (*per_token, segment_ids_BT), (*shared, state), axes=axes)


def run_per_token_op(
    run: Callable[..., jax.Array], per_token: Sequence[jax.Array], shared: Sequence[jax.Array]
) -> jax.Array:
    """Returns `run(*per_token, *shared)`, [B, T, ...], with time split as the current mesh splits it.

    The result for a token must depend on that token only. Arguments are as in `run_recurrent_op`.
    """
    axes = time_axes(per_token[0].shape[1])
    if not axes:
        return run(*per_token, *shared)
    return map_shards(lambda per_token, shared: (run(*per_token, *shared), ()), per_token, shared, axes=axes)[0]


def shard_length(length: int) -> int:
    """Returns how many tokens of a row of `length` tokens one device holds."""
    mesh = jax.sharding.get_abstract_mesh()
    return length // math.prod(mesh.shape[axis] for axis in time_axes(length))


def map_shards(
    call: Callable[[Any, Any], tuple[Any, Any]], per_token: Any, shared: Any, *, axes: tuple[str, ...]
) -> tuple[Any, Any]:
    """Calls `call(per_token, shared)` on every device, with its shard of the sequence.

    Args:
      call: returns (a tree of arrays [B, T, ...], a tree of arrays that are equal on every shard).
      per_token: a tree of arrays [B, T, ...].
      shared: a tree of arrays without a time axis; every shard gets all of each.
      axes: the mesh axes that split time, from `time_axes`.
    """
    split_time = jax.P(None, axes)
    mapped = jax.shard_map(
        call,
        in_specs=(split_time, jax.P()),
        out_specs=(split_time, jax.P()),
        axis_names=set(axes),
        check_vma=False,  # the results of kernels do not say over which mesh axes they vary
    )
    return mapped(per_token, shared)


def _carry_through_shards(advance: Callable[[Any, Any], Any], summary, state, segment_ids_BT, axes) -> tuple[Any, Any]:
    """Returns (the state that enters this device's shard, the state after the last shard)."""
    all_shards = jax.lax.all_gather((summary, segment_ids_BT[:, 0], segment_ids_BT[:, -1]), axes)

    def over_shard(carried, shard):
        state, previous_document_B = carried
        summary, first_document_B, last_document_B = shard
        continues_B = first_document_B == previous_document_B
        state = jax.tree.map(lambda x: where_per_row(continues_B, x, 0), state)
        return (advance(summary, state), last_document_B), state

    row_document_B = all_shards[1][0]  # the initial state belongs to the document of the row's first token
    (final, _), entering_S = jax.lax.scan(over_shard, (state, row_document_B), all_shards)
    return jax.tree.map(lambda x_S: x_S[jax.lax.axis_index(axes)], entering_S), final


def where_per_row(condition_B: jax.Array, x_BX: jax.Array, y: jax.typing.ArrayLike) -> jax.Array:
    """Returns `jnp.where` with one condition for each row of the batch."""
    return jnp.where(condition_B.reshape(-1, *(1,) * (x_BX.ndim - 1)), x_BX, y)


def remaining_log_decays(log_decay_BTX: jax.Array, segment_ids_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the logarithms of what remains at the end of the shard, -inf where nothing does.

    Each sum is made of the log decays of its own tokens only. A difference of two cumulative sums would lose small
    decays next to large ones.

    Returns:
      (the log decay from each token to the end of the shard [B, T, X];
      the log decay of the state that enters the shard [B, X]).
    """
    log_decay_BTX = jnp.maximum(log_decay_BTX, LOG_DECAY_FLOOR)
    since_BTX = jax.lax.cumsum(log_decay_BTX, axis=1, reverse=True)
    until_BTX = jnp.concatenate([since_BTX[:, 1:], jnp.zeros_like(since_BTX[:, :1])], axis=1)
    of_last_BT = segment_ids_BT == segment_ids_BT[:, -1:]
    until_BTX = jnp.where(of_last_BT.reshape(*of_last_BT.shape, *(1,) * (until_BTX.ndim - 2)), until_BTX, -jnp.inf)
    return until_BTX, where_per_row(of_last_BT[:, 0], since_BTX[:, 0], -jnp.inf)


def decay_and_add(summary: tuple[jax.Array, Any], state: Any) -> Any:
    """Computes `ShardTransition.advance` for states [B, H, K, ...] that decay.

    Args:
      summary: (the log decay of the state over the shard [B, H, K], what the shard writes, a tree like the state).
    """
    log_decay_BHK, written = summary
    return jax.tree.map(lambda x, added: jnp.exp(log_decay_BHK)[..., None] * x + added, state, written)
