"""Runs commands one after another and passes signals on to the one that is running."""

import signal
import subprocess
from collections.abc import Sequence
from types import FrameType
from typing import Self


class SignalRelay:
    """Runs commands as child processes while it handles this process's signals.

    Each command has a session of its own. Otherwise a terminal's Ctrl-C, which goes to the whole process group, would
    reach the command twice, and the trainer exits without saving on a second signal.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.received: int | None = None  # the last signal that came
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._pass_on) for number in self.SIGNALS}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """Runs `command` and returns its exit status; after a signal it starts nothing and returns 128 + signal."""
        if self.received:
            return 128 + self.received
        self._process = subprocess.Popen(command, start_new_session=True)
        if self.received:  # the signal came while the command started
            self._process.send_signal(self.received)
        status = self._process.wait()
        self._process = None
        return status

    def _pass_on(self, number: int, _: FrameType | None) -> None:
        self.received = number
        if self._process is not None:
            self._process.send_signal(number)
