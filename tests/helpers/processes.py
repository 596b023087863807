"""Starts `mesanet_jax` commands as several processes of this machine, each with CPU devices of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

from tests.helpers.smoke import ROOT


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Group:
    """Processes of one command; `argvs` are their arguments, one list a process."""

    def __init__(self, module: str, argvs: list[list[str]], *, devices: int):
        coordinator = f"--coordinator=127.0.0.1:{free_port()}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        self.processes = []
        for index, argv in enumerate(argvs):
            joining = [coordinator, f"--processes={len(argvs)}", f"--process={index}"] if len(argvs) > 1 else []
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-u", "-m", module, *argv, *joining],
                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
                    env=os.environ | {"XLA_FLAGS": flags, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
                )
            )  # fmt: skip

    def running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def signal(self, index: int, number: int) -> float:
        """When the signal was sent, by `time.monotonic`."""
        assert self.running(), "a process ended before the signal"
        self.processes[index].send_signal(number)
        return time.monotonic()

    def ended(self, *, timeout: float = 240) -> list[SimpleNamespace]:
        """Status, output and end time of each, once all have ended; those that have not by then are killed."""
        deadline = time.monotonic() + timeout
        ends: dict[int, float] = {}
        with contextlib.ExitStack() as stack:
            for process in self.processes:
                stack.callback(process.kill)
            while len(ends) < len(self.processes) and time.monotonic() < deadline:
                for index, process in enumerate(self.processes):
                    if index not in ends and process.poll() is not None:
                        ends[index] = time.monotonic()
                time.sleep(0.02)
        outputs = [process.communicate()[0] for process in self.processes]
        assert len(ends) == len(self.processes), "\n".join(outputs)
        return [
            SimpleNamespace(status=process.returncode, output=output, at=ends[index])
            for index, (process, output) in enumerate(zip(self.processes, outputs, strict=True))
        ]
