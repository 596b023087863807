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

    `unsaved` is set by the trainer while there is something to lose: steps that no checkpoint holds, or a checkpoint
    that is being written. A second signal ends the process at once.
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
            leave = self._received is not None or not self.unsaved
            plan = "stopping now" if leave else "saving, then stopping (once more to stop at once)"
            print(f"\n{signal.Signals(number).name}: {plan}", file=sys.stderr, flush=True)
            if leave:
                os._exit(128 + number)
            self._received = number

    @property
    def received(self) -> bool:
        """Whether to drop what can be done again; never with several processes, which must go on in step."""
        return self._received is not None and jax.process_count() == 1

    def requested(self, step: int) -> bool:
        """Whether to save and stop after `step`; with several processes all agree on the same step."""
        if jax.process_count() > 1:
            return multihost_utils.reached_preemption_sync_point(step)
        return self.received

    @property
    def exit_status(self) -> int:
        """The status by convention of a process ended by this signal."""
        return 128 + (self._received or signal.SIGTERM)
