"""The device mesh and the one table that maps logical axes to it.

Parameters and activations carry logical axis names ("embed", "heads", ...); only this file knows which mesh axis each
stands for. All mesh axes are `Auto`: the compiler propagates shardings from the parameters and the batch.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_jax.errors import UserError
from mesanet_kernels import use_mesh_axes

AXES = ("data", "fsdp", "tensor")

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),  # rows of the batch are split over every axis that replicates the model
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    None: None,
}
use_mesh_axes(batch=RULES["batch"], heads=(RULES["heads"],))


def make_mesh(sizes: Sequence[int], devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A (data, fsdp, tensor) mesh; one size may be -1, meaning all remaining devices.

    Over several slices the data axis is split first, so that only gradients cross the slow network between them.

    Raises:
      UserError: if the sizes do not multiply to the number of devices, or the data axis cannot be split over slices.
    """
    devices = jax.devices() if devices is None else devices
    slices = len({getattr(device, "slice_index", None) for device in devices})
    fixed = math.prod(size for size in sizes if size != -1)
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes)
    if math.prod(shape) != len(devices) or shape[0] % slices:
        where = f"{len(devices)} devices" + (
            f" in {slices} slices, which data must be a multiple of" if slices > 1 else ""
        )
        raise UserError(
            f"--config.mesh: {_named(sizes)}, but here are {where}; {_proposal(sizes, len(devices) // slices)}"
        )
    types = (AxisType.Auto,) * len(AXES)
    if slices == 1:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    inside, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
    return jax.sharding.Mesh(mesh_utils.create_hybrid_device_mesh(inside, across, devices), AXES, axis_types=types)


def _named(sizes: Sequence[int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def _proposal(sizes: Sequence[int], devices: int) -> str:
    """The mesh nearest to `sizes` that a slice of `devices` has: tensor and fsdp as far as they divide it, data free."""
    _, fsdp, tensor = (max(1, size) for size in sizes)
    tensor = math.gcd(tensor, devices)
    fsdp = math.gcd(fsdp, devices // tensor)
    return f"try --config.mesh.data=-1 --config.mesh.fsdp={fsdp} --config.mesh.tensor={tensor}"


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


def local_rows(mesh: jax.sharding.Mesh, batch_size: int) -> list[int]:
    """The rows of a global batch that this process's devices hold, ascending.

    Where the model is split over processes, several of them hold the same rows.
    """
    held = batch_sharding(mesh).addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for (rows,) in held for row in range(*rows.indices(batch_size))})


def place_batch(batch: dict, mesh: jax.sharding.Mesh) -> dict:
    """The global batch on the mesh, from the `local_rows` of each of its arrays."""
    shards = batch_shards(mesh)
    size = len(next(iter(batch.values()))) * shards // len(local_rows(mesh, shards))
    position = {row: at for at, row in enumerate(local_rows(mesh, size))}

    def place(rows):
        def part(index):
            start, stop, _ = index[0].indices(size)
            return rows[position[start] : position[start] + stop - start]

        return jax.make_array_from_callback((size, *rows.shape[1:]), batch_sharding(mesh), part)

    return {name: place(np.asarray(rows)) for name, rows in batch.items()}


def constrain(x, axes: Sequence[str | None]):
    """Pins an activation to its logical axes; outside any mesh (a unit test, a notebook) it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))
