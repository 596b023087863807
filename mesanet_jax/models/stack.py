"""Blocks in depth: whole periods of a pattern are stacked and scanned over; what remains of one follows as a tail.

Scanning keeps compile time independent of depth. Values that belong to single layers (decoding states, scalars) travel
as a pair: one tree for all groups, whose leaves have a leading axis over the groups, and one tree for the tail.

L layers, P blocks per period.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import jax
from flax import nnx

from mesanet_jax.flops import Flops
from mesanet_jax.layers import stack as stack_modules
from mesanet_jax.models.block import Group
from mesanet_jax.models.interface import LayerStats
from mesanet_jax.remat import remat

Pair = tuple[Any, Any]  # (of all groups, of the tail); the second is None if there is no tail
Maker = Callable[..., nnx.Module]  # called as maker(rngs=rngs)


class HasBlocks(Protocol):
    """A module with blocks in depth: its attributes `groups` and `tail` come from `make_blocks`."""

    groups: Group
    tail: Group | None


class Stack(nnx.Module):
    """Blocks in depth as a module of their own."""

    def __init__(self, makers: Sequence[Maker], layers: int, *, rngs: nnx.Rngs):
        self.groups, self.tail = make_blocks(makers, layers, rngs=rngs)


def make_blocks(makers: Sequence[Maker], layers: int, *, rngs: nnx.Rngs) -> tuple[Group, Group | None]:
    """`layers` blocks as (groups, tail). The `makers` are one period: each makes one block, in turn."""
    count, rest = divmod(layers, len(makers))
    groups = cast(Group, stack_modules(lambda rngs: Group(makers, rngs=rngs), count, rngs=rngs))
    return groups, Group(makers[:rest], rngs=rngs) if rest else None


def scan(
    blocks: HasBlocks,
    call: Callable[[Group, Any, Any], tuple[Any, Any]],
    x: Any,
    per_group: Pair = (None, None),
    *,
    policy: str = "none",
    looped: bool = True,
) -> tuple[Any, Pair]:
    """Runs `x, y = call(group, x, given)` for every group and then the tail: (the last x, the pair of all y).

    Args:
      per_group: the pair of what each group is given.
      policy: what the backward pass recomputes (`mesanet_jax.remat`).
      looped: whether the program contains one group, in a loop, or all groups one after another. Without a loop, the
        values kept for the gradients are not copied into arrays of all groups, but compilation takes longer.
    """
    given_to_groups, given_to_tail = per_group

    def body(graphdef):
        def run(x, params_and_given):
            params, given = params_and_given
            return call(nnx.merge(graphdef, params), x, given)

        return run

    graphdef, params = nnx.split(blocks.groups)
    run = remat(body(graphdef), policy, scanned=looped)
    x, of_groups = jax.lax.scan(run, x, (params, given_to_groups), unroll=not looped)
    if blocks.tail is None:
        return x, (of_groups, None)
    graphdef, params = nnx.split(blocks.tail)
    x, of_tail = remat(body(graphdef), policy, scanned=False)(x, (params, given_to_tail))
    return x, (of_groups, of_tail)


def split_layers(blocks: HasBlocks, values: Any) -> Pair:
    """Splits a tree of per-layer values [L, ...] into the pair that `scan` takes: [groups, P, ...] and [tail, ...]."""
    period = len(blocks.groups.names)
    rest = 0 if blocks.tail is None else len(blocks.tail.names)
    of_groups = jax.tree.map(lambda x: x[: len(x) - rest].reshape(-1, period, *x.shape[1:]), values)
    return of_groups, jax.tree.map(lambda x: x[len(x) - rest :], values) if rest else None


def init_states(blocks: HasBlocks, make: Callable[[Group], Any]) -> Pair:
    """The pair of decoding states, where `make(group)` makes those of one group."""
    graphdef, params = nnx.split(blocks.groups)
    of_groups = jax.vmap(lambda params: make(nnx.merge(graphdef, params)))(params)
    return of_groups, None if blocks.tail is None else make(blocks.tail)


def stats_by_layer(blocks: HasBlocks, stats: Pair) -> LayerStats:
    """The statistics of all blocks (the y of a scan with `Group.with_stats`) by name and layer."""
    of_groups, of_tail = stats
    by_layer: LayerStats = {}
    period, count = len(blocks.groups.names), _group_count(blocks)
    for index, of_block in enumerate(of_groups):
        for name, values in of_block.items():
            layers = {period * group + index: value for group, value in enumerate(values)}
            by_layer.setdefault(name, {}).update(layers)
    if blocks.tail is not None:
        for index, of_block in enumerate(of_tail):
            for name, value in of_block.items():
                by_layer.setdefault(name, {})[period * count + index] = value
    return by_layer


def blocks_flops(blocks: HasBlocks, seq_len: int) -> Flops:
    """FLOPs of one token of a row of `seq_len` in all blocks; the parameters may be shape structs."""
    graphdef, params = nnx.split(blocks.groups)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), params)
    one = nnx.merge(graphdef, shapes).flops_per_token(seq_len)
    tail = Flops() if blocks.tail is None else blocks.tail.flops_per_token(seq_len)
    return one * _group_count(blocks) + tail


def _group_count(blocks: HasBlocks) -> int:
    leaves = jax.tree.leaves(nnx.state(blocks.groups))
    return leaves[0].shape[0]
