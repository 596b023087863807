"""Argument checks shared by every op: they run on shapes and dtypes, before anything is traced."""

import jax.numpy as jnp


def check_shapes(op, arguments):
    """Checks that the sizes written with one letter agree over all arguments.

    Args:
      op: the public function's name, for the message.
      arguments: name -> (array or None, axes); axes is one letter a dimension ("BTHK"). None arrays
        are skipped: they are optional arguments left out.

    Returns:
      letter -> size.

    Raises:
      ValueError: a wrong rank, a size of zero, or a size that differs from that of an earlier argument.
    """
    sizes, owner = {}, {}
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


def check_dtypes(op, kind, arguments):
    """Raises ValueError where an array (None: skipped) is not of `kind`, e.g. jnp.floating or jnp.integer."""
    for name, array in arguments.items():
        if array is not None and not jnp.issubdtype(array.dtype, kind):
            raise ValueError(f"{op}: {name} has dtype {array.dtype}; it needs a {kind.__name__} dtype")


def check_positive(op, **numbers):
    """Raises ValueError where a number (None: skipped) is below 1."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise ValueError(f"{op}: {name} is {number}; it must be at least 1")


def check_groups(op, sizes):
    """Raises ValueError where the query heads H are not a multiple of the key heads J."""
    if sizes["H"] % sizes["J"]:
        raise ValueError(f"{op}: q has {sizes['H']} heads and k {sizes['J']}; q's must be a multiple of k's")


def segments(op, segment_ids, sizes):
    """`segment_ids` [B, T], checked; one document a row where it is None."""
    shape = sizes["B"], sizes["T"]
    if segment_ids is None:
        return jnp.zeros(shape, jnp.int32)
    if segment_ids.shape != shape:
        raise ValueError(f"{op}: segment_ids has shape {segment_ids.shape}; it needs [B, T] = {shape}")
    check_dtypes(op, jnp.integer, {"segment_ids": segment_ids})
    return segment_ids


def accumulation_dtype(*arrays):
    """float32, or float64 where an array is float64: the dtype of states and of sums."""
    return jnp.result_type(jnp.float32, *(array.dtype for array in arrays))
