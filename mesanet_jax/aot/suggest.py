"""Looks for the rows per device and the rematerialisation policy to run with, in few compilations.

A bisection finds the most rows per device that fit if everything is recomputed. It starts from the config itself: if
that fits, its rows also fit with more recomputation. With these rows, the policies with less recomputation are then
tried one after another, until one does not fit.
"""

import dataclasses
from collections.abc import Callable

POLICIES = ("full", "mixer", "matmuls", "none")  # from most to least recomputation


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A setting that was compiled: whether it fits, and the estimated seconds per step with no transfer hidden."""

    remat: str
    rows: int
    fits: bool
    seconds: float | None


def search(share: int, attempt: Callable[[str, int], Candidate], *, first: Candidate) -> list[Candidate]:
    """Returns all candidates that were compiled, in order.

    Args:
      share: the rows per device and step, which it takes in equal turns.
      attempt: compiles a step with (remat, rows).
      first: the candidate that is already compiled.
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
    low = place + 1 if first.fits else 0  # with everything recomputed, sizes[:low] fit and sizes[high:] do not
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
    """Returns the candidate with the most rows that fit, and with them the least recomputation."""
    fitting = [candidate for candidate in tried if candidate.fits]
    return max(fitting, key=lambda each: (each.rows, POLICIES.index(each.remat)), default=None)


def fastest(tried: list[Candidate]) -> Candidate | None:
    """Returns the candidate that fits and has the least estimated seconds, if there are estimates."""
    timed = [(each.seconds, index) for index, each in enumerate(tried) if each.fits and each.seconds]
    return tried[min(timed)[1]] if timed else None
