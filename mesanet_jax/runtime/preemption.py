"""SIGTERM and Ctrl-C: finish the step, save, leave; at once where there is nothing to save.

Python runs a signal handler between two bytecodes of the main thread, which compiling can hold up for minutes. So the
kernel's wake-up byte is read by a thread, which ends the process itself while no unsaved step exists.

Several processes agree by a reduction over all devices, asked for after every step and answered one step later, so that
no device waits: a signal to one of them then stops all after the same step, with the same status.
"""

import functools
import signal
import socket
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_jax.runtime import distributed

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Preemption:
    """Context manager that turns a signal into a request to stop.

    `unsaved` is set by the trainer while there is something to lose: steps that no checkpoint holds, or a checkpoint
    that is being written. A second signal ends the process at once.
    """

    def __init__(self):
        self.unsaved = False
        self._received = 0  # the signal that came to this process
        self._agreed = 0  # the one that all processes act upon
        self._asked: jax.Array | None = None

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
            if self._received or not self.unsaved:
                distributed.end(128 + number, f"{name}: stopping now")
            print(f"\n{name}: saving, then stopping (once more to stop at once)", file=sys.stderr, flush=True)
            self._received = number

    def requested(self) -> bool:
        """Whether to save and stop after this step. All processes ask after every step, and get the same answer."""
        if jax.process_count() == 1:
            return self.interrupted()
        before, self._asked = self._asked, _maximum(self._received)
        if before is not None:
            self._agreed = max(self._agreed, int(before))
        return self._agreed > 0

    def interrupted(self) -> bool:
        """Whether to drop what can be done again. All processes ask at the same point, wait, and get the same answer."""
        self._agreed = self._received if jax.process_count() == 1 else int(_maximum(max(self._received, self._agreed)))
        return self._agreed > 0

    @property
    def exit_status(self) -> int:
        """The status by convention of a process ended by the agreed signal."""
        return 128 + self._agreed


def _maximum(value: int) -> jax.Array:
    """The greatest of all processes' values, being computed."""
    split, reduce = _reduction()
    return reduce(jax.make_array_from_process_local_data(split, np.full(jax.local_device_count(), value, np.int32)))


@functools.cache
def _reduction():
    """How a value a device is laid out, and the jitted maximum of all."""
    mesh = Mesh(np.array(jax.devices()), "all")
    return NamedSharding(mesh, P("all")), jax.jit(jnp.max, out_shardings=NamedSharding(mesh, P()))
