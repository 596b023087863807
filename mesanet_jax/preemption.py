"""SIGTERM and Ctrl-C: finish the step, save, leave; at once where there is nothing to save.

Python runs a signal handler between two bytecodes of the main thread, which compiling can hold up for minutes. So the
kernel's wake-up byte is read by a thread, which ends the process itself while no unsaved step exists.
"""

import os
import signal
import socket
import sys
import threading

import jax
from jax.experimental import multihost_utils

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Context manager that turns a signal into a request to stop.

    `unsaved` is set by the trainer while steps exist that no checkpoint holds. A second signal ends the process.
    """

    def __init__(self):
        self.unsaved = False
        self._received: int | None = None

    def __enter__(self):
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="preemption", daemon=True).start()
        return self

    def __exit__(self, *_):
        signal.set_wakeup_fd(-1)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._writer.close()

    def _watch(self) -> None:
        while byte := self._reader.recv(1):
            number = byte[0]
            if number not in SIGNALS:
                continue
            name = signal.Signals(number).name
            if self._received is not None or not self.unsaved:
                print(f"\n{name}: nothing unsaved, stopping now" if not self.unsaved else f"\n{name} again: stopping now", file=sys.stderr, flush=True)
                os._exit(128 + number)
            self._received = number
            print(f"\n{name}: saving after this step (once more to stop at once)", file=sys.stderr, flush=True)

    def requested(self, step: int) -> bool:
        """Whether to save and stop after `step`; with several processes all agree on the same step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received is not None

    @property
    def exit_status(self) -> int:
        """The status by convention of a process ended by this signal."""
        return 128 + (self._received or signal.SIGTERM)
