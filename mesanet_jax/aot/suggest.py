"""Looks for the microbatch and the remat policy to run with, in few compilations.

The most rows a device that fit with everything recomputed are found by bisection, from what the config itself came to:
where it fits, so do its rows with more recomputed. With those rows, recomputation is taken back policy by policy, as far
as it still fits.
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


def search(share: int, attempt: Callable[[str, int], Candidate], *, first: Candidate) -> list[Candidate]:
    """All candidates compiled, in that order.

    Args:
      share: the rows of a device in a step; it takes them in equal turns.
      attempt: compiles (remat, rows).
      first: what is compiled already.
    """
    sizes = [rows for rows in range(1, share + 1) if share % rows == 0]
    tried = [first]

    def fits(remat: str, rows: int) -> bool:
        known = next((each for each in tried if (each.remat, each.rows) == (remat, rows)), None)
        if known is None:
            known = attempt(remat, rows)
            tried.append(known)
        return known.fits

    place, least = sizes.index(first.rows), POLICIES.index(first.remat)
    low = place + 1 if first.fits else 0  # sizes[:low] fit with all recomputed, sizes[high:] do not
    high = place if not first.fits and least == 0 else len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(POLICIES[0], sizes[middle]) else (low, middle)
    if low:
        rows = sizes[low - 1]
        for remat in POLICIES[1 + least if first.fits and rows == first.rows else 1 :]:
            if not fits(remat, rows):
                break
    return tried


def best(tried: list[Candidate]) -> Candidate | None:
    """The most rows that fit, and with them the least recomputation."""
    fitting = [candidate for candidate in tried if candidate.fits]
    return max(fitting, key=lambda each: (each.rows, POLICIES.index(each.remat)), default=None)


def fastest(tried: list[Candidate]) -> Candidate | None:
    """The one of those that fit with the least estimated seconds, where there are estimates."""
    return min((each for each in tried if each.fits and each.seconds), key=lambda each: each.seconds, default=None)
