"""Work on whole matrices of which every device holds a part: whole layers are handed out instead.

L layers, I inputs and O outputs of a matrix.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mesanet_jax.mesh import partition_spec


def on_whole_matrices(call: Callable, matrices, axes):
    """`call` of all matrices, where each device computes its own, whole.

    Left alone, the compiler would split every product inside `call` as the parameters are split, and send partial sums
    around after each. Here each device exchanges its part of all matrices for all parts of its matrices, and back.
    Matrices of one shape and split go together, so that there is work for all devices.

    Args:
      call: of [L, I, O], elementwise in L, to an array of the same shape; zero where it is zero.
      matrices: a tree of [..., I, O].
      axes: of each the logical names of I and O (`mesanet_jax.mesh`), which say how the mesh splits them.
    """
    leaves, structure = jax.tree.flatten(matrices)
    alike: dict[tuple, list[int]] = {}
    for index, (leaf, names) in enumerate(zip(leaves, structure.flatten_up_to(axes), strict=True)):
        alike.setdefault((leaf.shape[-2:], tuple(names)), []).append(index)
    for (shape, names), indices in alike.items():
        stacks = [leaves[index].reshape(-1, *shape) for index in indices]
        done_LIO = _on_stack(call, jnp.concatenate(stacks), names)
        parts = jnp.split(done_LIO, np.cumsum([len(stack) for stack in stacks])[:-1])
        for index, part in zip(indices, parts, strict=True):
            leaves[index] = part.reshape(leaves[index].shape)
    return structure.unflatten(leaves)


def _on_stack(call: Callable, x_LIO: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """`call(x)`, with two all-to-alls for each axis of the mesh that splits a matrix.

    Where devices are more than layers, or do not divide them, zero matrices fill up.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return call(x_LIO)
    layers = len(x_LIO)
    ways, layouts = _handing_out(partition_spec(axes, x_LIO.shape, mesh)[1:], layers, mesh)
    x_LIO = jnp.pad(x_LIO, ((0, -layers % ways), (0, 0), (0, 0)))
    for layout in layouts:
        x_LIO = jax.lax.with_sharding_constraint(x_LIO, layout)
    x_LIO = call(x_LIO)
    for layout in reversed(layouts):
        x_LIO = jax.lax.with_sharding_constraint(x_LIO, layout)
    return x_LIO[:layers]


def _handing_out(sides: Sequence[str | None], layers: int, mesh) -> tuple[int, list[P]]:
    """Among how many devices layers are dealt, and the layouts from matrices split as `sides` to whole ones.

    Axes of the mesh that hold copies take layers of their own as long as there are enough. One axis moves at a time: a
    change of two at once the partitioner does by gathering everything everywhere.
    """
    ways = math.prod(mesh.shape[axis] for axis in sides if axis)
    held, sides = [], list(sides)
    for axis in mesh.axis_names:
        if axis not in sides and ways * mesh.shape[axis] <= layers:
            held.append(axis)
            ways *= mesh.shape[axis]
    layouts = [P(tuple(held), *sides)]
    for side, axis in enumerate(sides):
        if axis:
            held.append(axis)
            sides[side] = None
            layouts.append(P(tuple(held), *sides))
    return ways, layouts
