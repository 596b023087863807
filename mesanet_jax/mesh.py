"""The device mesh and the one table that maps logical axes to it.

Parameters and activations carry logical axis names ("embed", "heads", ...); only this file knows which mesh axis each
stands for. All mesh axes are `Auto`: the compiler propagates shardings from the parameters and the batch.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_jax.errors import UserError
from mesanet_kernels import mesh_axes

AXES = ("data", "fsdp", "tensor", "sequence")
LAYOUT = ("data", "fsdp", "sequence", "tensor")  # devices along the last ones are neighbours: they talk the most

RULES: dict[str | None, str | tuple[str, ...] | None] = {
    "batch": ("data", "fsdp"),  # rows of the batch are split over every axis that replicates the model
    "replica": "data",
    "time": "sequence",
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    None: None,
}
ROWS = ("batch", "time")  # of an array of a batch


@contextlib.contextmanager
def use_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Runs on `mesh`: enters `jax.set_mesh`, and tells the kernels which of its axes split batch, heads and time."""
    with jax.set_mesh(mesh), mesh_axes(batch=RULES["batch"], heads=(RULES["heads"],), time=(RULES["time"],)):
        yield


def make_mesh(sizes: Sequence[int], devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """A mesh with the sizes of AXES; those left out are 1, and one may be -1, meaning all remaining devices.

    Over several slices the data axis is split first, so that only gradients cross the slow network between them.

    Raises:
      UserError: if the sizes do not multiply to the number of devices, or the data axis cannot be split over slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = (*sizes, *(1 for _ in AXES[len(sizes) :]))
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
    shape = tuple(shape[AXES.index(axis)] for axis in LAYOUT)
    if slices == 1:
        return jax.make_mesh(shape, LAYOUT, axis_types=types, devices=devices)
    inside, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
    return jax.sharding.Mesh(mesh_utils.create_hybrid_device_mesh(inside, across, devices), LAYOUT, axis_types=types)


def _named(sizes: Sequence[int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def _proposal(sizes: Sequence[int], devices: int) -> str:
    """The mesh nearest to `sizes` that a slice of `devices` has: the others as far as they divide it, data free."""
    nearest = {}
    for axis, size in reversed([*zip(AXES, sizes, strict=True)][1:]):
        nearest[axis] = math.gcd(max(1, size), devices)
        devices //= nearest[axis]
    return " ".join(["try --config.mesh.data=-1", *(f"--config.mesh.{axis}={nearest[axis]}" for axis in AXES[1:])])


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
    """Of the arrays [B, T] of a batch: rows split over the batch axes, time over its own."""
    return NamedSharding(mesh, P(*(RULES[axis] for axis in ROWS)))


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

    Where the model or the time of a row is split over processes, several of them hold the same rows, whole.
    """
    rows = NamedSharding(mesh, P(RULES["batch"]))
    held = rows.addressable_devices_indices_map((batch_size,)).values()
    return sorted({row for (rows,) in held for row in range(*rows.indices(batch_size))})


def place_batch(batch: dict, mesh: jax.sharding.Mesh) -> dict:
    """The global batch on the mesh, from the `local_rows` of each of its arrays."""
    shards = batch_shards(mesh)
    size = len(next(iter(batch.values()))) * shards // len(local_rows(mesh, shards))
    position = {row: at for at, row in enumerate(local_rows(mesh, size))}

    def place(rows):
        def part(index):
            start, stop, _ = index[0].indices(size)
            return rows[position[start] : position[start] + stop - start, index[1]]

        return jax.make_array_from_callback((size, *rows.shape[1:]), batch_sharding(mesh), part)

    return {name: place(np.asarray(rows)) for name, rows in batch.items()}


def constrain(x, axes: Sequence[str | None]):
    """Pins an activation to its logical axes; outside any mesh (a unit test, a notebook) it does nothing."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))
