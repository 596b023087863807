"""Blocks in depth: whole periods of a pattern, stacked and scanned over, and the beginning of another at the end.

Compile time then need not grow with depth. What belongs to single layers (states, scalars) travels as a pair: of the
groups, every leaf with a leading axis over them, and of the tail.

L layers, P blocks of a period.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from mesanet_jax.flops import Flops
from mesanet_jax.layers import stack
from mesanet_jax.models.block import Group
from mesanet_jax.remat import remat


class Stack(nnx.Module):
    """`layers` blocks, made in turn by the functions of `rngs=` that are one period: parameters `groups` and `tail`."""

    def __init__(self, makers: Sequence[Callable[..., nnx.Module]], layers: int, *, rngs: nnx.Rngs):
        count, rest = divmod(layers, len(makers))
        self.groups = stack(lambda rngs: Group(makers, rngs=rngs), count, rngs=rngs)
        self.tail = Group(makers[:rest], rngs=rngs) if rest else None

    def scan(self, call: Callable, x, per_group=(None, None), *, policy: str = "none", looped: bool = True):
        """x after `x, y = call(group, x, of_group)` of every group in turn, and the pair of y's.

        Args:
          per_group: the pair of what each group is given.
          policy: what the backward pass recomputes (`mesanet_jax.remat`).
          looped: whether the program has the groups once, in a loop, or one after the other. Without a loop what is kept
            for the gradients is not copied to and from arrays of all groups; compilation takes longer.
        """
        of_groups, of_tail = per_group

        def run(graphdef):
            return lambda x, params_and_given: call(nnx.merge(graphdef, params_and_given[0]), x, params_and_given[1])

        graphdef, stacked = nnx.split(self.groups)
        step = remat(run(graphdef), policy, scanned=looped)
        x, y_of_groups = jax.lax.scan(step, x, (stacked, of_groups), unroll=not looped)
        if self.tail is None:
            return x, (y_of_groups, None)
        graphdef, params = nnx.split(self.tail)
        x, y_of_tail = remat(run(graphdef), policy, scanned=False)(x, (params, of_tail))
        return x, (y_of_groups, y_of_tail)

    def by_group(self, values: Any):
        """A tree of values a layer, [L, ...], as the pair that `scan` takes: [groups, P, ...] and [blocks of the tail, ...]."""
        period = len(self.groups.names)
        rest = 0 if self.tail is None else len(self.tail.names)

        def of_groups(x):
            return x[: len(x) - rest].reshape(-1, period, *x.shape[1:])

        return jax.tree.map(of_groups, values), jax.tree.map(lambda x: x[len(x) - rest :], values) if rest else None

    def init_states(self, state: Callable):
        """The pair of `state(group)`."""
        graphdef, stacked = nnx.split(self.groups)
        return (
            jax.vmap(lambda params: state(nnx.merge(graphdef, params)))(stacked),
            None if self.tail is None else state(self.tail),
        )

    def blocks_flops(self, seq_len: int) -> Flops:
        """FLOPs of one token of a row of `seq_len` in all blocks; the parameters may be shape structs."""
        graphdef, stacked = nnx.split(self.groups)
        count = jax.tree.leaves(stacked)[0].shape[0]
        one = nnx.merge(graphdef, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked))
        tail = Flops() if self.tail is None else self.tail.flops_per_token(seq_len)
        return one.flops_per_token(seq_len) * count + tail
