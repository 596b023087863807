"""The device mesh and the one table that maps logical axes to it.

Parameters and activations carry logical axis names ("embed", "heads", ...); only this file knows which mesh axis each
stands for. All mesh axes are `Auto`: the compiler propagates shardings from the parameters and the batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_jax.errors import UserError

AXES = ("data", "fsdp", "tensor")

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),  # rows of the batch are split over every axis that replicates the model
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    None: None,
}


def make_mesh(sizes: Sequence[int], devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A (data, fsdp, tensor) mesh; one size may be -1, meaning all remaining devices.

    Raises:
      UserError: if the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    fixed = math.prod(size for size in sizes if size != -1)
    if len(devices) % fixed or (-1 not in sizes and fixed != len(devices)):
        named = ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))
        raise UserError(f"--config.mesh: {named} needs a multiple of {fixed} devices, here are {len(devices)}")
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """How many ways the rows of a batch are split."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def partition_spec(axes: Sequence[str | None], shape: Sequence[int], mesh) -> P:
    """The PartitionSpec of an array; `axes` name its last dimensions, stacked layers come before them.

    A dimension that its mesh axis does not divide stays whole (a 6-head gate on a tensor axis of 4, say).
    """
    names: list = [None] * (len(shape) - len(axes))
    for axis, size in zip(axes, shape[len(names) :], strict=True):
        target = RULES[axis]
        ways = math.prod(mesh.shape[name] for name in ((target,) if isinstance(target, str) else target or ()))
        names.append(target if size % ways == 0 else None)
    return P(*names)


def shardings(axes_tree, shapes_tree, mesh: jax.sharding.Mesh):
    """NamedShardings for a tree of parameters, from the tree of their logical axes."""
    return jax.tree.map(
        lambda leaf, axes: NamedSharding(mesh, partition_spec(axes, leaf.shape, mesh)), shapes_tree, axes_tree
    )


def with_shardings(shapes_tree, shardings_tree):
    """Shape structs that carry the shardings of a tree like theirs."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes_tree,
        shardings_tree,
    )


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows split over the batch axes, everything else whole."""
    return NamedSharding(mesh, P(RULES["batch"]))


def placed(batches: Iterable[dict], mesh: jax.sharding.Mesh) -> Iterator[dict]:
    """Host batches as global arrays, each sent a whole step before it is used, which hides the transfer."""
    ahead = None
    for batch in batches:
        ready, ahead = ahead, place_batch(batch, mesh)
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead


def place_batch(batch: dict, mesh: jax.sharding.Mesh) -> dict:
    """The global batch on the mesh, from this process's rows of each of its arrays."""
    sharding = batch_sharding(mesh)
    return {
        name: jax.make_array_from_process_local_data(sharding, np.ascontiguousarray(rows))
        for name, rows in batch.items()
    }


def constrain(x, axes: Sequence[str | None]):
    """Pins an activation to its logical axes; outside any mesh (a unit test, a notebook) it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))
