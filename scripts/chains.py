"""Commands that run one after another, and several such chains at once on one GPU."""

import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

Command = Sequence[str]


def module(name: str) -> list[str]:
    """The beginning of a command of mesanet_jax."""
    return [sys.executable, "-m", f"mesanet_jax.{name}"]


def run_together(chains: Mapping[str, Sequence[Command]], logs: pathlib.Path, *, jobs: int) -> bool:
    """Whether all chains ended well, `jobs` at once, each with its share of the GPU's memory and LOGS/NAME.log."""
    with ThreadPoolExecutor(jobs) as pool:
        one = lambda name: run(chains[name], logs / f"{name}.log", share=0.9 / jobs)
        return all([*pool.map(one, chains)])


def run(commands: Sequence[Command], log: pathlib.Path, *, share: float = 0.9) -> bool:
    """Whether all commands ended well, one after another in a `share` of the GPU's memory; what they print goes to `log`."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}"} | os.environ
    with log.open("a") as out:
        for command in commands:
            began = time.monotonic()
            status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, env=environment).returncode
            seconds = time.monotonic() - began
            print(f"$ {' '.join(command)}\n  exit status {status} after {seconds:.0f} s, see {log}", flush=True)
            if status:
                return False
    return True
