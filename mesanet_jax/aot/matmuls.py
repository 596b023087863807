"""Counts the FLOPs of the matrix products in a compiled program, including recomputation and padding.

XLA's own count (`compiled.cost_analysis()`) counts the body of a loop once; this one counts it once per iteration.
"""

import functools
import math
import re

import numpy as np

from mesanet_jax.aot import hlo


def flops(module: hlo.Module) -> int:
    """Returns the FLOPs per step and device, two for each multiply-add, without those in Pallas kernels."""
    return sum(visit.times * _COUNT[visit.instruction.opcode](visit) for visit in _products(module))


def _products(module: hlo.Module):
    return (visit for visit in hlo.walk(module) if visit.instruction.opcode in _COUNT)


def _operand_dims(visit: hlo.Visit, index: int) -> tuple[int, ...]:
    return hlo.dims(visit.computation.instructions[visit.instruction.operands[index]].shape)


def _dot(visit: hlo.Visit) -> int:
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", visit.instruction.attributes)
    assert found is not None
    left = _operand_dims(visit, 0)
    summed = math.prod(left[int(axis)] for axis in found[1].split(",") if axis)
    return 2 * math.prod(hlo.dims(visit.instruction.shape)) * summed


def _convolution(visit: hlo.Visit) -> int:
    """Counts a convolution, as which the TPU compiler writes every product.

    Batch dimensions become windows full of padding and holes, so only the taps that meet a value count.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", visit.instruction.attributes)
    assert labels is not None
    left, right, out = labels.groups()
    left_dims, right_dims, out_dims = (
        _operand_dims(visit, 0),
        _operand_dims(visit, 1),
        hlo.dims(visit.instruction.shape),
    )
    size = out_dims[out.index("b")] * out_dims[out.index("f")] * right_dims[right.index("i")]
    window = dict(re.findall(r"(\w+)=([-\w]+)", "".join(re.findall(r"window=\{(.*?)\}", visit.instruction.attributes))))
    for axis in range(len(out) - 2):
        label = str(axis)
        size *= _taps(
            left_dims[left.index(label)],
            right_dims[right.index(label)],
            out_dims[out.index(label)],
            stride=int(_part(window, "stride", axis, "1")),
            low=int(_part(window, "pad", axis, "0_0").split("_")[0]),
            left_dilation=int(_part(window, "lhs_dilate", axis, "1")),
            right_dilation=int(_part(window, "rhs_dilate", axis, "1")),
        )
    return 2 * size


def _part(window: dict[str, str], name: str, axis: int, default: str) -> str:
    """Returns the value of a window's attribute along an axis."""
    return window[name].split("x")[axis] if name in window else default


@functools.cache
def _taps(left: int, right: int, out: int, *, stride: int, low: int, left_dilation: int, right_dilation: int) -> int:
    """Returns the number of (output position, tap) pairs that meet a value rather than padding or a hole."""
    at = np.arange(out)[:, None] * stride + np.arange(right) * right_dilation - low
    return int(np.count_nonzero((at % left_dilation == 0) & (at >= 0) & (at // left_dilation < left)))


_COUNT = {"dot": _dot, "convolution": _convolution}
