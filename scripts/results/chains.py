"""Runs chains of commands, one command after another, and several chains at once on one GPU."""

import itertools
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

Command = Sequence[str]
Chains = Mapping[str, Sequence[Command]]


def module(name: str) -> list[str]:
    """Returns the beginning of the command line of a module."""
    return [sys.executable, "-m", name]


def carry_out(
    first: Command, chains: Chains, reports: Sequence[Command], out: pathlib.Path, *, jobs: int, dry: bool
) -> bool:
    """Runs a command that needs the GPU alone, then the chains, then the reports; returns whether all succeeded.

    `dry` only prints the commands.
    """
    if dry:
        for command in (first, *itertools.chain.from_iterable(chains.values()), *reports):
            print(f"$ {' '.join(command)}")
        return True
    good = [run([first], out / "first.log"), run_together(chains, out, jobs=jobs), run(reports, out / "reports.log")]
    return all(good)


def run_together(chains: Chains, logs: pathlib.Path, *, jobs: int) -> bool:
    """Runs the chains, `jobs` at once, each with its share of the GPU's memory; returns whether all succeeded.

    What a chain prints goes to LOGS/NAME.log.
    """
    with ThreadPoolExecutor(jobs) as pool:
        return all([*pool.map(lambda name: run(chains[name], logs / f"{name}.log", share=0.9 / jobs), chains)])


def run(commands: Sequence[Command], log: pathlib.Path, *, share: float = 0.9) -> bool:
    """Runs commands until one fails, in a `share` of the GPU's memory; returns whether all succeeded.

    What they print goes to `log`.
    """
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
