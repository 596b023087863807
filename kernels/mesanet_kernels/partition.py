"""Kernels on a mesh: the compiler cannot split them, so each device is given its own rows and heads to call them on.

A program says once which mesh axes split batch and heads (`use_mesh_axes`); where the mesh of the context has them, a
kernel is called in a `shard_map` over them. Time, key and value sizes are never split.

B batch, H heads; other letters are not split.
"""

import math
from collections.abc import Callable, Sequence

import jax

_axes: dict[str, tuple[str, ...]] = {"B": (), "H": ()}


def use_mesh_axes(*, batch: Sequence[str] = (), heads: Sequence[str] = ()) -> None:
    """From now on kernels are split over these axes of any mesh that has them (`jax.set_mesh`)."""
    _axes.update(B=tuple(batch), H=tuple(heads))


def partitioned(call: Callable, arrays: Sequence[jax.Array], *, axes: Sequence[str], results: Sequence[str]):
    """`call(*arrays)` with B and H of every array split over the mesh of the context.

    Args:
      axes, results: a letter for each dimension of the arrays and of what `call` returns, a tuple.
    """
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {letter: size for x, letters in zip(arrays, axes, strict=True) for letter, size in zip(letters, x.shape)}
    split = {letter: _dividing(mesh, names, sizes[letter]) for letter, names in _axes.items()}
    if not any(split.values()):
        return call(*arrays)
    spec = lambda letters: jax.P(*(split.get(letter) or None for letter in letters))
    return jax.shard_map(
        call,
        in_specs=tuple(spec(letters) for letters in axes),
        out_specs=tuple(spec(letters) for letters in results),
        check_vma=False,  # a kernel's results have no such types
    )(*arrays)


def _dividing(mesh, names: tuple[str, ...], size: int) -> tuple[str, ...]:
    """The axes that the mesh has, is not split manually over already, and that together divide `size`; else none."""
    free = () if mesh.empty else tuple(name for name in names if name in mesh.shape and name not in mesh.manual_axes)
    ways = math.prod(mesh.shape[name] for name in free)
    return free if ways > 1 and size % ways == 0 else ()
