"""Counts broken input, remembers its first places, and stops the preparation if the config says so."""

import collections
from typing import Any

from mesanet_jax.data.formats import HARMLESS, Problem
from mesanet_jax.errors import UserError

SHOWN = 20  # places that the manifest and the console show


class Problems:
    """The number of problems of each kind, and the first places, of a unit or of a whole preparation.

    Attributes:
      counts: {kind: number of problems}.
      places: a line for each of the first problems.
    """

    def __init__(self, *, on_error: str, max_errors: int):
        self._on_error = on_error
        self._max_errors = max_errors
        self.counts: collections.Counter[str] = collections.Counter()
        self.places: list[str] = []

    def add(self, problem: Problem) -> None:
        """Counts a problem.

        Raises:
          UserError: the problem is fatal (on_error="fail"), or there are more than `max_errors`.
        """
        line = f"{problem.place}: {problem.kind}: {problem.detail}"
        if self._on_error == "fail" and problem.kind not in HARMLESS:
            raise UserError(f"{line}; fix the input, or skip and count such input with --config.on_error=skip")
        self.merge({"counts": {problem.kind: 1}, "places": [line]})

    def merge(self, record: dict[str, Any]) -> None:
        """Adds the problems of a `record`.

        Raises:
          UserError: there are more than `max_errors`, apart from harmless ones.
        """
        self.counts.update(record["counts"])
        self.places = (self.places + record["places"])[:SHOWN]
        serious = sum(count for kind, count in self.counts.items() if kind not in HARMLESS)
        if serious > self._max_errors:
            raise UserError(f"{serious} problems in the input, more than config.max_errors={self._max_errors}; {self}")

    def record(self) -> dict[str, Any]:
        """Returns the counts and places as JSON can hold them."""
        return {"counts": dict(sorted(self.counts.items())), "places": self.places}

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        return f"{counts}; first at {self.places[0]}" if self.places else "no problems"
