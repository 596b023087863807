"""Handles SIGTERM and Ctrl-C: finish the step, save and exit; exit at once if there is nothing to save.

Python runs a signal handler only between two bytecodes of the main thread, and a compilation can delay that for
minutes. Therefore a thread reads the byte that the interpreter writes when a signal arrives (`signal.set_wakeup_fd`),
and ends the process itself while there is nothing to save.

Several processes agree by a reduction over all devices. It is started after every step and read one step later, so
that no device waits. A signal to one process then stops all processes after the same step, with the same status.
"""

import functools
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_jax.runtime import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """A context manager that turns a signal into a request to stop; a second signal ends the process at once.

    Attributes:
      unsaved: whether there is something to lose: steps that no checkpoint holds, or a checkpoint that is being
        written. The trainer sets it.
    """

    def __init__(self):
        self.unsaved = False
        self._received = 0  # the signal that this process received
        self._agreed = 0  # the signal that all processes act on
        self._pending: jax.Array | None = None  # the reduction that was started after the previous step

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="preemption", daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
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
            if self._received or not self.unsaved:
                distributed.end(128 + number, f"{name}: stopping now")
            print(f"\n{name}: saving, then stopping (repeat it to stop at once)", file=sys.stderr, flush=True)
            self._received = number

    def requested(self) -> bool:
        """Whether to save and stop after this step. All processes ask after every step and get the same answer."""
        if jax.process_count() == 1:
            return self.interrupted()
        previous, self._pending = self._pending, _maximum(self._received)
        if previous is not None:
            self._agreed = max(self._agreed, int(previous))
        return self._agreed > 0

    def interrupted(self) -> bool:
        """Whether to abandon work that can be repeated. All processes ask at the same point and get the same answer.

        Unlike `requested`, this waits for the other processes.
        """
        self._agreed = self._received if jax.process_count() == 1 else int(_maximum(max(self._received, self._agreed)))
        return self._agreed > 0

    @property
    def exit_status(self) -> int:
        """The conventional exit status of a process that ended because of the agreed signal."""
        return 128 + self._agreed


def _maximum(value: int) -> jax.Array:
    """Starts to compute the maximum of the values of all processes."""
    split, reduce = _reduction()
    return reduce(jax.make_array_from_process_local_data(split, np.full(jax.local_device_count(), value, np.int32)))


@functools.cache
def _reduction() -> tuple[NamedSharding, Callable[[jax.Array], jax.Array]]:
    """The sharding of an array with one value per device, and the jitted maximum of such an array."""
    mesh = Mesh(np.array(jax.devices()), "all")
    return NamedSharding(mesh, P("all")), jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
