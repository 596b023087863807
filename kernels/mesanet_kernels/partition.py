"""How ops are split over the devices of a mesh: which mesh axes split the batch, the heads and the time.

A program says which with the context `mesh_axes`, beside the mesh itself (`jax.set_mesh`). Both are part of what jit
remembers of a trace: a function that was traced under other axes is traced again.

The compiler cannot split a kernel, so `partitioned` calls it once per device, on that device's rows and heads. Time is
split by sequence_parallel.py. Key and value sizes are never split.

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
    """Splits the ops called inside over these axes of the mesh (`jax.set_mesh`), as far as the mesh has them."""
    with _context(MeshAxes(tuple(batch), tuple(heads), tuple(time))):
        yield


def _axes(letter: str) -> tuple[str, ...]:
    return _context.value.of(letter)


def partitioned(
    call: Callable, arrays: Sequence[jax.Array], *, axes: Sequence[str], results: Sequence[str]
) -> tuple[jax.Array, ...]:
    """Returns `call(*arrays)`, called on each device with its part of every array along B and H.

    Args:
      call: returns a tuple of arrays.
      axes: for each array, one letter for each of its dimensions.
      results: the same for each array that `call` returns.
    """
    sizes = {letter: size for x, letters in zip(arrays, axes, strict=True) for letter, size in zip(letters, x.shape)}
    split = {letter: _dividing(_axes(letter), sizes[letter]) for letter in "BH"}
    if not any(split.values()):
        return call(*arrays)
    spec = lambda letters: jax.P(*(split.get(letter) or None for letter in letters))
    return jax.shard_map(
        call,
        in_specs=tuple(spec(letters) for letters in axes),
        out_specs=tuple(spec(letters) for letters in results),
        check_vma=False,  # a kernel's results carry no types of this kind
    )(*arrays)


def on_a_device(letter: str, size: int) -> int:
    """Returns how many of `size` rows ("B") or heads ("H") one device gets from `partitioned`."""
    mesh = jax.sharding.get_abstract_mesh()
    return size // math.prod(mesh.shape[axis] for axis in _dividing(_axes(letter), size))


def time_axes(length: int) -> tuple[str, ...]:
    """Returns the mesh axes that split a row of `length` tokens.

    They are empty outside a mesh, inside a computation that is already split in time (`sequence_parallel`), and where
    the axes do not divide the row evenly.
    """
    return _dividing(_axes("T"), length)


def _dividing(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """Returns those of the axes that the mesh has and that are not split by hand already, if they divide `size`."""
    mesh = jax.sharding.get_abstract_mesh()
    free = () if mesh.empty else tuple(name for name in names if name in mesh.shape and name not in mesh.manual_axes)
    ways = math.prod(mesh.shape[name] for name in free)
    return free if ways > 1 and size % ways == 0 else ()
