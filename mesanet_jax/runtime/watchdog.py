"""Ends a run that hangs: a collective that waits for a lost host, a file system that no longer answers."""

import faulthandler
import sys
import threading
import time
from collections.abc import Iterable, Iterator

from mesanet_jax.runtime import distributed

FIRST = 4  # times as long until the first beat, which compiles


class Watchdog:
    """Context manager: without a `beat` for `minutes`, all threads' stacks go to stderr and the run ends.

    The status is `distributed.STUCK`; other processes of the run end with it, their stacks dumped as well. `minutes=None`
    never ends anything.
    """

    def __init__(self, minutes: float | None):
        self._limit = minutes and 60 * minutes
        self._allowed = self._limit and FIRST * self._limit
        self._last = time.monotonic()
        self._over = threading.Event()

    def __enter__(self):
        if self._limit:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_):
        self._over.set()

    def beat(self) -> None:
        """Something finished: a step, a batch of an evaluation, a save."""
        self._last, self._allowed = time.monotonic(), self._limit

    def watched(self, items: Iterable) -> Iterator:
        """The items; that the next one is asked for is a beat."""
        for item in items:
            yield item
            self.beat()

    def _watch(self) -> None:
        while (left := self._last + self._allowed - time.monotonic()) > 0:
            if self._over.wait(min(left, self._limit / 10)):  # the first beat shortens what is allowed
                return
        faulthandler.dump_traceback(file=sys.stderr)
        minutes = (time.monotonic() - self._last) / 60
        distributed.end(
            distributed.STUCK, f"error: no step finished for {minutes:.3g} minutes; every thread's stack is above"
        )
