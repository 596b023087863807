"""The TPU chips that a run can be compiled for on a machine that has none, and the slices that Cloud offers.

Sources: cloud.google.com/tpu/docs/{v5e,v5p,v6e}, read 2026-11-30.
"""

import dataclasses
import itertools
import math


@dataclasses.dataclass(frozen=True)
class Chip:
    """The properties of a chip.

    Attributes:
      hbm: GiB that the TPU compiler can use for a program, as libtpu 0.0.50 reports when it runs out of memory.
      clock: GHz, derived from the peak in `mesanet_jax.flops` and the size of the matrix units; None if that is not
        possible, and then there is no estimate.
      link: GB/s that leave a chip over all its links, which is half of the published "bidirectional" figure.
      cores: what a chip adds to the number in Cloud's own names, in which v5p-128 has 64 chips.
      slices: the shapes of a slice, smallest first.
    """

    hbm: float
    clock: float | None
    link: float
    cores: int
    slices: tuple[str, ...]


def chips_in(shape: str) -> int:
    """Returns the number of chips in a shape: 64 for '4x4x4'."""
    return math.prod(int(side) for side in shape.split("x"))


def _cubes() -> tuple[str, ...]:
    """Returns the slices of v5p that consist of whole cubes of 4x4x4 chips, up to 16x16x24."""
    sides = itertools.combinations_with_replacement(range(4, 25, 4), 3)
    shapes = ["x".join(map(str, side)) for side in sides if side[1] <= 16]
    return tuple(sorted(shapes, key=chips_in))


_SQUARES = ("2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")

CHIPS = {
    "v5e": Chip(hbm=15.75, clock=1.5, link=200, cores=1, slices=_SQUARES),
    "v5p": Chip(hbm=95.73, clock=1.75, link=600, cores=2, slices=("2x2x1", "2x2x2", "2x2x4", "2x4x4", *_cubes())),
    "v6e": Chip(hbm=31.24, clock=None, link=400, cores=1, slices=_SQUARES),
}
