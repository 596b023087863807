"""Starts `mesanet_jax` commands as several local processes, each with its own CPU devices."""

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
    """The processes of one command; `argvs` are their arguments, one list per process."""

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
        """Sends a signal to a process and returns the time (`time.monotonic`)."""
        assert self.running(), "a process ended before the signal"
        self.processes[index].send_signal(number)
        return time.monotonic()

    def ended(self, *, timeout: float = 240) -> list[SimpleNamespace]:
        """Waits for all processes, kills those that do not end, and returns the status, output and end time of each."""
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
