"""What to do with broken input: count it, remember where it was, and stop where the config says so."""

import collections

from mesanet_jax.data.formats import HARMLESS, Problem
from mesanet_jax.errors import UserError

SHOWN = 20  # places kept for the manifest and the console


class Problems:
    """Counts by kind and the first places, of one unit or, added up in order, of all."""

    def __init__(self, *, on_error: str, max_errors: int):
        self._on_error = on_error
        self._max_errors = max_errors
        self.counts: collections.Counter[str] = collections.Counter()
        self.places: list[str] = []

    def add(self, problem: Problem) -> None:
        """Counts a problem. Raises UserError where it is fatal."""
        line = f"{problem.place}: {problem.kind}: {problem.detail}"
        if self._on_error == "fail" and problem.kind not in HARMLESS:
            raise UserError(f"{line}; --config.on_error=skip passes over such input and counts it")
        self.merge({"counts": {problem.kind: 1}, "places": [line]})

    def merge(self, record: dict) -> None:
        self.counts.update(record["counts"])
        self.places = (self.places + record["places"])[:SHOWN]
        serious = sum(count for kind, count in self.counts.items() if kind not in HARMLESS)
        if serious > self._max_errors:
            raise UserError(f"{serious} problems in the input, more than config.max_errors={self._max_errors}; {self}")

    def record(self) -> dict:
        return {"counts": dict(sorted(self.counts.items())), "places": self.places}

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{counts}; first at {self.places[0]}" if self.places else "no problems"
