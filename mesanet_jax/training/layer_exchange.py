"""Exchanges matrices between devices, so that each device holds some layers whole instead of a part of every layer.

L layers, I inputs and O outputs of a matrix.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from mesanet_jax.mesh import partition_spec


def exchange_layers(call: Callable[[jax.Array], jax.Array], matrices: Any, axes: Any) -> Any:
    """Applies `call` to every matrix of a tree; on a mesh, each device computes some of the layers, whole.

    The compiler by itself would split every product inside `call` in the way the parameters are split, and would sum
    partial products over the devices after each of them. Here the devices exchange parts of matrices for whole ones
    once before `call`, and back once after it. Matrices of the same shape and sharding are stacked, so that there is
    work for all devices.

    Args:
      call: maps [L, I, O] to an array of the same shape. Each layer is computed independently of the others, and a
        layer of zeros gives zeros.
      matrices: a tree of arrays [..., I, O].
      axes: a tree like `matrices` with the logical names of I and O of each matrix (`mesanet_jax.mesh`).

    Returns:
      The results, in a tree like `matrices`.
    """
    leaves, structure = jax.tree.flatten(matrices)
    same_kind: dict[tuple, list[int]] = {}
    for index, (leaf, names) in enumerate(zip(leaves, structure.flatten_up_to(axes), strict=True)):
        same_kind.setdefault((leaf.shape[-2:], tuple(names)), []).append(index)
    for (shape, names), indices in same_kind.items():
        stacks = [leaves[index].reshape(-1, *shape) for index in indices]
        result_LIO = _exchange_stack(call, jnp.concatenate(stacks), names)
        parts = jnp.split(result_LIO, np.cumsum([len(stack) for stack in stacks])[:-1])
        for index, part in zip(indices, parts, strict=True):
            leaves[index] = part.reshape(leaves[index].shape)
    return structure.unflatten(leaves)


def _exchange_stack(call: Callable, x_LIO: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Returns `call(x_LIO)`, with two all-to-alls for each mesh axis that splits the matrices.

    Layers of zeros are appended if the devices outnumber the layers or do not divide them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return call(x_LIO)
    layers = len(x_LIO)
    ways, layouts = _layouts(partition_spec(axes, x_LIO.shape, mesh)[1:], layers, mesh)
    x_LIO = jnp.pad(x_LIO, ((0, -layers % ways), (0, 0), (0, 0)))
    for layout in layouts:
        x_LIO = jax.lax.with_sharding_constraint(x_LIO, layout)
    x_LIO = call(x_LIO)
    for layout in reversed(layouts):
        x_LIO = jax.lax.with_sharding_constraint(x_LIO, layout)
    return x_LIO[:layers]


def _layouts(sides: Sequence[Any], layers: int, mesh: jax.sharding.AbstractMesh) -> tuple[int, list[P]]:
    """Returns over how many devices the layers are split, and the layouts from split matrices to whole ones.

    `sides` are the mesh axes that split I and O. Mesh axes along which the matrices are replicated take layers of their
    own as long as there are enough. One mesh axis moves at a time: XLA's partitioner changes two at once by gathering
    everything on every device.
    """
    ways = math.prod(mesh.shape[axis] for axis in sides if axis)
    on_layers, sides = [], list(sides)
    for axis in mesh.axis_names:
        if axis not in sides and ways * mesh.shape[axis] <= layers:
            on_layers.append(axis)
            ways *= mesh.shape[axis]
    layouts = [P(tuple(on_layers), *sides)]
    for side, axis in enumerate(sides):
        if axis:
            on_layers.append(axis)
            sides[side] = None
            layouts.append(P(tuple(on_layers), *sides))
    return ways, layouts
