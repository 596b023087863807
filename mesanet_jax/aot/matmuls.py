"""FLOPs of the matrix products in a compiled program: what the chip executes, recomputation and padding included.

XLA's own count (`compiled.cost_analysis()`) takes the body of a loop once; this one takes it by its trip count.
"""

import functools
import math
import re

import numpy as np

from mesanet_jax.aot import hlo


def flops(module: hlo.Module) -> int:
    """FLOPs a step on one device, two a multiply-add; Pallas kernels are not in it."""
    return sum(visit.times * _COUNT[visit.instruction.opcode](visit) for visit in _products(module))


def _products(module: hlo.Module):
    return (visit for visit in hlo.walk(module) if visit.instruction.opcode in _COUNT)


def _operand_dims(visit: hlo.Visit, index: int) -> tuple[int, ...]:
    return hlo.dims(visit.computation.instructions[visit.instruction.operands[index]].shape)


def _dot(visit: hlo.Visit) -> int:
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", visit.instruction.attributes)[1]
    left = _operand_dims(visit, 0)
    summed = math.prod(left[int(axis)] for axis in contracting.split(",") if axis)
    return 2 * math.prod(hlo.dims(visit.instruction.shape)) * summed


def _convolution(visit: hlo.Visit) -> int:
    """The TPU compiler writes every product as a convolution, batch dimensions as windows full of padding and holes:
    only taps that meet a value count."""
    left, right, out = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", visit.instruction.attributes).groups()
    left_dims, right_dims, out_dims = (
        _operand_dims(visit, 0),
        _operand_dims(visit, 1),
        hlo.dims(visit.instruction.shape),
    )
    size = out_dims[out.index("b")] * out_dims[out.index("f")] * right_dims[right.index("i")]
    window = dict(re.findall(r"(\w+)=([-\w]+)", "".join(re.findall(r"window=\{(.*?)\}", visit.instruction.attributes))))
    for axis in range(len(out) - 2):
        label = str(axis)
        part = lambda name, default: window[name].split("x")[axis] if name in window else default
        size *= _taps(
            left_dims[left.index(label)],
            right_dims[right.index(label)],
            out_dims[out.index(label)],
            stride=int(part("stride", "1")),
            low=int(part("pad", "0_0").split("_")[0]),
            left_dilation=int(part("lhs_dilate", "1")),
            right_dilation=int(part("rhs_dilate", "1")),
        )
    return 2 * size


@functools.cache
def _taps(left: int, right: int, out: int, *, stride: int, low: int, left_dilation: int, right_dilation: int) -> int:
    """Pairs of an output position and a tap of the kernel that meet a value, neither padding nor a hole."""
    at = np.arange(out)[:, None] * stride + np.arange(right) * right_dilation - low
    return int(np.count_nonzero((at % left_dilation == 0) & (at >= 0) & (at // left_dilation < left)))


_COUNT = {"dot": _dot, "convolution": _convolution}
