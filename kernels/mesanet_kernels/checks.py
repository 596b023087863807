"""Argument checks that all ops share. They run on shapes and dtypes, before anything is traced."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def check_shapes(op: str, arguments: Mapping[str, tuple[jax.Array | None, str]]) -> dict[str, int]:
    """Checks that sizes written with the same letter agree over all arguments.

    Args:
      op: the name of the public function, for the message.
      arguments: the arrays by name, each with its axes: one letter for each dimension, as in "BTHK". An array that is
        None is skipped: it is an optional argument that was left out.

    Returns:
      The size of each letter.

    Raises:
      ValueError: an array has a wrong rank, a size of zero, or a size that differs from that of an earlier array.
    """
    sizes: dict[str, int] = {}
    owner: dict[str, str] = {}
    for name, (array, axes) in arguments.items():
        if array is None:
            continue
        wanted = "[" + ", ".join(f"{axis}={sizes[axis]}" if axis in sizes else axis for axis in axes) + "]"
        if array.ndim != len(axes):
            raise ValueError(f"{op}: {name} has shape {array.shape}; it needs {len(axes)} dimensions, {wanted}")
        for axis, size in zip(axes, array.shape):
            if size == 0:
                raise ValueError(f"{op}: {name} has shape {array.shape}; no dimension may be empty")
            owner.setdefault(axis, name)
            if sizes.setdefault(axis, size) != size:
                raise ValueError(
                    f"{op}: {name} has shape {array.shape}; it needs {wanted}, {axis}={sizes[axis]} as in {owner[axis]}"
                )
    return sizes


def check_dtypes(op: str, kind: type, arguments: Mapping[str, jax.Array | None]) -> None:
    """Raises ValueError if an array has no dtype of `kind`, which is `jnp.floating` or `jnp.integer`; skips None."""
    for name, array in arguments.items():
        if array is not None and not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; it needs a {kind.__name__} dtype")


def check_positive(op: str, **numbers: int | None) -> None:
    """Raises ValueError if a number is below 1; skips None."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{op}: {name} is {number}; it must be at least 1")


def check_groups(op: str, sizes: Mapping[str, int]) -> None:
    """Raises ValueError if the number of query heads H is not a multiple of the number of key heads J."""
    if sizes["H"] % sizes["J"]:
        raise ValueError(
            f"{op}: q has {sizes['H']} heads and k {sizes['J']}; the heads of q must be a multiple of those of k"
        )


def segments(op: str, segment_ids: jax.Array | None, sizes: Mapping[str, int]) -> jax.Array:
    """Checks and returns `segment_ids` [B, T]; if it is None, returns ids that make each row one document.

    Raises:
      ValueError: the shape or the dtype is wrong.
    """
    shape = sizes["B"], sizes["T"]
    if segment_ids is None:
        return jnp.zeros(shape, jnp.int32)
    if segment_ids.shape != shape:
        raise ValueError(f"{op}: segment_ids has shape {segment_ids.shape}; it needs [B, T] = {shape}")
    check_dtypes(op, jnp.integer, {"segment_ids": segment_ids})
    return segment_ids


def accumulation_dtype(*arrays: jax.Array) -> DTypeLike:
    """Returns the dtype of states and sums: float32, or float64 if an array is float64."""
    return jnp.result_type(jnp.float32, *(array.dtype for array in arrays))
