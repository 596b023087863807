"""Ends a run that hangs, because a collective waits for a lost host or a file system no longer answers, for example."""

import faulthandler
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Self, TypeVar

from mesanet_jax.runtime import distributed

FIRST = 4  # the first step compiles, so it is allowed this many times the limit

Item = TypeVar("Item")


class Watchdog:
    """A context manager that ends the run if there is no `beat` for `minutes`; None: it never does.

    It prints the stacks of all threads to stderr and ends with status `distributed.STUCK`. The other processes of the
    run also print their stacks and end.
    """

    def __init__(self, minutes: float | None):
        self._limit = None if minutes is None else 60 * minutes
        self._allowed = FIRST * (self._limit or 0)
        self._last = time.monotonic()
        self._over = threading.Event()

    def __enter__(self) -> Self:
        if self._limit is not None:
            threading.Thread(target=self._watch, args=(self._limit,), name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()

    def beat(self) -> None:
        """Reports progress: a step, an evaluation batch or a checkpoint is finished."""
        self._last, self._allowed = time.monotonic(), self._limit or 0

    def watched(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items, with a beat after each of them is used."""
        for item in items:
            yield item
            self.beat()

    def _watch(self, limit: float) -> None:
        while (left := self._last + self._allowed - time.monotonic()) > 0:
            if self._over.wait(min(left, limit / 10)):  # in short waits, since the first beat shortens what is allowed
                return
        faulthandler.dump_traceback(file=sys.stderr)
        minutes = (time.monotonic() - self._last) / 60
        text = f"error: no step finished for {minutes:.3g} minutes; the stacks of all threads are printed above"
        distributed.end(distributed.STUCK, text)
