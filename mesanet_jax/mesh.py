"""The device mesh, and the table that maps logical axes to mesh axes.

Parameters and activations carry the names of logical axes ("embed", "heads", ...). Only this module knows which mesh
axes split each of them. All mesh axes are `Auto`: the compiler derives the other shardings from those of the parameters
and the batch.
"""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_jax.errors import UserError
from mesanet_kernels import mesh_axes

if TYPE_CHECKING:
    Device = Any  # jaxlib has no type stubs
else:
    Device = jax.Device

Batch = Mapping[str, np.ndarray]

AXES = ("data", "fsdp", "tensor", "sequence")
# The order of the axes in the mesh. Devices along the last axes are neighbours, because they exchange the most data.
LAYOUT = ("data", "fsdp", "sequence", "tensor")

# The mesh axes that split each logical axis. "fsdp" splits the rows of the batch as "data" does; it also splits the
# parameters, but only to store them: each is gathered for its computation.
RULES: dict[str | None, tuple[str, ...]] = {
    "batch": ("data", "fsdp"),
    "replica": ("data",),
    "time": ("sequence",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    None: (),
}
BATCH_AXES = ("batch", "time")  # the logical axes of the arrays [B, T] of a batch


@contextlib.contextmanager
def use_mesh(mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Sets the mesh (`jax.set_mesh`) and declares to the kernels which of its axes split batch, heads and time."""
    with jax.set_mesh(mesh), mesh_axes(batch=RULES["batch"], heads=RULES["heads"], time=RULES["time"]):
        yield


def make_mesh(sizes: Sequence[int], devices: Sequence[Device] | None = None) -> jax.sharding.Mesh:
    """Makes a mesh of the given devices.

    If the devices belong to several slices, the data axis is split over the slices first, so that only gradients cross
    the slow network between them.

    Args:
      sizes: the sizes of `AXES`. Those left out at the end are 1. One may be -1, which means all remaining devices.
      devices: the devices of the mesh. Default: all devices.

    Raises:
      UserError: the product of the sizes is not the number of devices, or the size of the data axis is not a multiple
        of the number of slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = (*sizes, *(1 for _ in AXES[len(sizes) :]))
    slices = len({getattr(device, "slice_index", None) for device in devices})
    fixed = math.prod(size for size in sizes if size != -1)
    shape = tuple(len(devices) // fixed if size == -1 else size for size in sizes)
    if math.prod(shape) != len(devices) or shape[0] % slices:
        problem = f"the product of the sizes must be the number of devices, {len(devices)}"
        if math.prod(shape) == len(devices):
            problem = f"data is {shape[0]} and must be a multiple of the number of slices, {slices}"
        raise UserError(f"--config.mesh: {_named(sizes)}: {problem}; {_proposal(sizes, len(devices) // slices)}")
    types = (AxisType.Auto,) * len(AXES)
    shape = tuple(shape[AXES.index(axis)] for axis in LAYOUT)
    if slices == 1:
        return jax.make_mesh(shape, LAYOUT, axis_types=types, devices=devices)
    inside, across = (shape[0] // slices, *shape[1:]), (slices, *(1 for _ in shape[1:]))
    return jax.sharding.Mesh(mesh_utils.create_hybrid_device_mesh(inside, across, devices), LAYOUT, axis_types=types)


def _named(sizes: Sequence[int]) -> str:
    return ", ".join(f"{axis}={size}" for axis, size in zip(AXES, sizes, strict=True))


def _proposal(sizes: Sequence[int], devices: int) -> str:
    """Proposes options for a mesh that is similar to `sizes` and fits into a slice of `devices` devices.

    The size of each axis except data becomes its greatest common divisor with the devices that remain; data is free.
    """
    proposed: dict[str, int] = {}
    for axis, size in reversed([*zip(AXES, sizes, strict=True)][1:]):
        proposed[axis] = math.gcd(max(1, size), devices)
        devices //= proposed[axis]
    return " ".join(["try --config.mesh.data=-1", *(f"--config.mesh.{axis}={proposed[axis]}" for axis in AXES[1:])])


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of parts into which the mesh splits the rows of a batch."""
    return math.prod(mesh.shape[axis] for axis in RULES["batch"])


def partition_spec(
    axes: Sequence[str | None], shape: Sequence[int], mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> P:
    """Returns the PartitionSpec of an array.

    A dimension whose size is not divisible by its mesh axes is not split (for example a gate with 6 heads on a tensor
    axis of size 4).

    Args:
      axes: the logical axes of the last dimensions. The dimensions before them (stacked layers) are not split.
      shape: the shape of the array.
      mesh: the mesh.
    """
    spec: list[tuple[str, ...] | None] = [None] * (len(shape) - len(axes))
    for axis, size in zip(axes, shape[len(spec) :], strict=True):
        names = RULES[axis]
        ways = math.prod(mesh.shape[name] for name in names)
        spec.append(names if names and size % ways == 0 else None)
    return P(*spec)


def shardings(axes_tree: Any, shapes_tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Returns a tree with the NamedSharding of each parameter.

    Args:
      axes_tree: a tree with the logical axes of each parameter.
      shapes_tree: a tree of the parameters, or of anything that has their shapes.
      mesh: the mesh.
    """
    return jax.tree.map(
        lambda leaf, axes: NamedSharding(mesh, partition_spec(axes, leaf.shape, mesh)), shapes_tree, axes_tree
    )


def with_shardings(shapes_tree: Any, shardings_tree: Any) -> Any:
    """Returns a tree of `jax.ShapeDtypeStruct` with the shapes and dtypes of one tree and the shardings of another."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes_tree,
        shardings_tree,
    )


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device holds whole."""
    return NamedSharding(mesh, P())


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of the arrays [B, T] of a batch, which are split along batch and time."""
    return NamedSharding(mesh, P(*(RULES[axis] for axis in BATCH_AXES)))


def placed(batches: Iterable[Batch], mesh: jax.sharding.Mesh) -> Iterator[dict[str, jax.Array]]:
    """Yields the batches of the host as global arrays (`place_batch`).

    The transfer of each batch starts one step before the batch is used, so that computation hides it.
    """
    ahead = None
    for batch in batches:
        ready, ahead = ahead, place_batch(batch, mesh)
        if ready is not None:
            yield ready
    if ahead is not None:
        yield ahead


def local_rows(mesh: jax.sharding.Mesh, batch_size: int) -> list[int]:
    """Returns the rows of a global batch that the devices of this process hold, in ascending order.

    If the model, or rows along time, are split over several processes, these processes hold the same rows. Each of them
    then reads the whole rows.
    """
    rows = NamedSharding(mesh, P(RULES["batch"]))
    held = cast(Any, rows.addressable_devices_indices_map((batch_size,)).values())
    return sorted({row for (rows,) in held for row in range(*rows.indices(batch_size))})


def place_batch(batch: Batch, mesh: jax.sharding.Mesh) -> dict[str, jax.Array]:
    """Returns the global batch on the mesh, made of the rows of each process.

    Args:
      batch: arrays [rows, T] with the rows that `local_rows` lists.
      mesh: the mesh.
    """
    shards = batch_shards(mesh)
    size = len(next(iter(batch.values()))) * shards // len(local_rows(mesh, shards))
    position = {row: index for index, row in enumerate(local_rows(mesh, size))}

    def place(rows: np.ndarray) -> jax.Array:
        def shard(index: Any) -> np.ndarray:  # a tuple of slices; jax's type also allows None
            start, stop, _ = index[0].indices(size)
            return rows[position[start] : position[start] + stop - start, index[1]]

        return jax.make_array_from_callback((size, *rows.shape[1:]), batch_sharding(mesh), shard)

    return {name: place(np.asarray(rows)) for name, rows in batch.items()}


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
    """Constrains the sharding of an activation to that of its logical axes; outside a mesh, returns it unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(axes, x.shape, mesh))
