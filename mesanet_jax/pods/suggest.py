"""Looks for the microbatch and the remat policy to run with, in few compilations.

The most rows a device that fit with everything recomputed are found by bisection; with those rows, recomputation is
taken back policy by policy, as far as it still fits.
"""

import dataclasses
from collections.abc import Callable

POLICIES = ("full", "mixer", "matmuls", "none")  # from most to least recomputation


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting that was compiled, whether it fits, and the estimated seconds of a step, transfers not hidden."""

    remat: str
    rows: int
    fits: bool
    seconds: float | None


def search(share: int, attempt: Callable[[str, int], Candidate]) -> list[Candidate]:
    """All candidates compiled, in that order.

    Args:
      share: the rows of a device in a step; it takes them in equal turns.
      attempt: compiles (remat, rows).
    """
    sizes = [rows for rows in range(1, share + 1) if share % rows == 0]
    tried = []

    def fits(remat: str, rows: int) -> bool:
        tried.append(attempt(remat, rows))
        return tried[-1].fits

    low, high = 0, len(sizes)  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(POLICIES[0], sizes[middle]) else (low, middle)
    if low:
        for remat in POLICIES[1:]:
            if not fits(remat, sizes[low - 1]):
                break
    return tried


def best(tried: list[Candidate]) -> Candidate | None:
    """The most rows that fit, and with them the least recomputation."""
    fitting = [candidate for candidate in tried if candidate.fits]
    return max(fitting, key=lambda each: (each.rows, POLICIES.index(each.remat)), default=None)
