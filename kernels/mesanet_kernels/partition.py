"""How ops are split over the devices of a mesh: which mesh axes split the batch, the heads and the time.

The context `mesh_axes` declares them, in addition to the mesh itself (`jax.set_mesh`). Both belong to the cache key of
`jax.jit`: a function that was traced under other axes is traced again.

The compiler cannot split a kernel, so `partitioned` calls it once per device, on that device's rows and heads. Time is
split by sequence_parallel.py. Keys and values are never split along their sizes K and V.

B batch, H heads, T time; dimensions with other letters are not split.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax


class MeshAxes(NamedTuple):
    """The names of the mesh axes that split each kind of dimension."""

    batch: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    time: tuple[str, ...] = ()

    def of(self, letter: str) -> tuple[str, ...]:
        """Returns the axes that split the dimension with this letter: "B", "H" or "T"."""
        return {"B": self.batch, "H": self.heads, "T": self.time}[letter]


_context = jax.make_user_context(default_value=MeshAxes())


@contextlib.contextmanager
def mesh_axes(*, batch: Sequence[str] = (), heads: Sequence[str] = (), time: Sequence[str] = ()) -> Iterator[None]:
    """Declares, for the ops called inside, which axes of the mesh split the batch, the heads and the time.

    The mesh is set with `jax.set_mesh`. Axes that it does not have are ignored.
    """
    with _context(MeshAxes(tuple(batch), tuple(heads), tuple(time))):
        yield


def _axes(letter: str) -> tuple[str, ...]:
    return _context.value.of(letter)


def partitioned(
    call: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    *,
    axes: Sequence[str],
    results: Sequence[str],
) -> Sequence[jax.Array]:
    """Calls `call(*arrays)` on each device, with the device's part of every array along B and H.

    Args:
      call: returns a tuple or a list of arrays.
      arrays: the arguments, whole.
      axes: for each argument, one letter for each of its dimensions, as in "BTHK".
      results: the same for each array that `call` returns.
    """
    sizes = {letter: size for x, letters in zip(arrays, axes, strict=True) for letter, size in zip(letters, x.shape)}
    split = {letter: _dividing(_axes(letter), sizes[letter]) for letter in "BH"}
    if not any(split.values()):
        return call(*arrays)

    def spec(letters: str) -> jax.P:
        return jax.P(*(split.get(letter) or None for letter in letters))

    return jax.shard_map(
        call,
        in_specs=tuple(spec(letters) for letters in axes),
        out_specs=tuple(spec(letters) for letters in results),
        check_vma=False,  # the results of kernels do not say over which mesh axes they vary
    )(*arrays)


def on_a_device(letter: str, size: int) -> int:
    """Returns how many of `size` rows (letter "B") or heads ("H") `partitioned` gives to one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return size // math.prod(mesh.shape[axis] for axis in _dividing(_axes(letter), size))


def time_axes(length: int) -> tuple[str, ...]:
    """Returns the mesh axes that split a row of `length` tokens.

    There are none outside a mesh, inside `sequence_parallel.map_shards`, which splits time already, and if the axes do
    not divide the row evenly.
    """
    return _dividing(_axes("T"), length)


def _dividing(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns those of the axes that the mesh has and that no enclosing `shard_map` splits, if they divide `size`."""
    mesh = jax.sharding.get_abstract_mesh()
    free = () if mesh.empty else tuple(name for name in names if name in mesh.shape and name not in mesh.manual_axes)
    ways = math.prod(mesh.shape[name] for name in free)
    return free if ways > 1 and size % ways == 0 else ()
