"""Which axes of the mesh split batch, heads and time, and kernels on such a mesh.

A program says it once (`use_mesh_axes`). The compiler cannot split a kernel, so each device is given its own rows and heads
to call it on (`partitioned`). Time is split over devices by sequence.py; key and value sizes are never split.

B batch, H heads, T time; other letters are not split.
"""

import math
from collections.abc import Callable, Sequence

import jax

_axes: dict[str, tuple[str, ...]] = {"B": (), "H": (), "T": ()}


def use_mesh_axes(*, batch: Sequence[str] = (), heads: Sequence[str] = (), time: Sequence[str] = ()) -> None:
    """From now on ops are split over these axes of any mesh that has them (`jax.set_mesh`)."""
    _axes.update(B=tuple(batch), H=tuple(heads), T=tuple(time))


def partitioned(call: Callable, arrays: Sequence[jax.Array], *, axes: Sequence[str], results: Sequence[str]):
    """`call(*arrays)` with B and H of every array split over the mesh of the context.

    Args:
      axes, results: a letter for each dimension of the arrays and of what `call` returns, a tuple.
    """
    sizes = {letter: size for x, letters in zip(arrays, axes, strict=True) for letter, size in zip(letters, x.shape)}
    split = {letter: _dividing(_axes[letter], sizes[letter]) for letter in "BH"}
    if not any(split.values()):
        return call(*arrays)
    spec = lambda letters: jax.P(*(split.get(letter) or None for letter in letters))
    return jax.shard_map(
        call,
        in_specs=tuple(spec(letters) for letters in axes),
        out_specs=tuple(spec(letters) for letters in results),
        check_vma=False,  # a kernel's results have no such types
    )(*arrays)


def on_a_device(letter: str, size: int) -> int:
    """How many of `size` rows ("B") or heads ("H") each call of `partitioned` is given."""
    mesh = jax.sharding.get_abstract_mesh()
    return size // math.prod(mesh.shape[axis] for axis in _dividing(_axes[letter], size))


def time_axes(length: int) -> tuple[str, ...]:
    """The mesh axes that split a row of `length` tokens; none outside a mesh, inside of `sequence.split`, and where they
    do not divide it."""
    return _dividing(_axes["T"], length)


def _dividing(names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The axes that the mesh has, is not split manually over already, and that together divide `size`; else none."""
    mesh = jax.sharding.get_abstract_mesh()
    free = () if mesh.empty else tuple(name for name in names if name in mesh.shape and name not in mesh.manual_axes)
    ways = math.prod(mesh.shape[name] for name in free)
    return free if ways > 1 and size % ways == 0 else ()
