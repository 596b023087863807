"""Measurements as JSON lines, one record per line, so that a command that runs again measures only what is missing."""

import json
import pathlib
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mesanet_jax.atomic import write_atomically

type Record = dict[str, Any]


def read(path: pathlib.Path) -> list[Record]:
    """Returns the records of a file; none if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Adds a record to a file, which is made if it is missing."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def write(path: pathlib.Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replaces the records of a file, compactly and with sorted keys."""
    lines = (json.dumps(record, separators=(",", ":"), sort_keys=True) + "\n" for record in records)
    write_atomically(path, "".join(lines))


def has(path: pathlib.Path, key: Mapping[str, Any]) -> bool:
    """Whether a record of the file has all values of `key`."""
    return any(key.items() <= record.items() for record in read(path))


def measured_by(module: str, arguments: Sequence[str]) -> tuple[int, Record]:
    """Runs a script as a child process and returns its exit status and the record that it prints as its last line.

    A measurement has a process of its own because the peak of memory is counted per process. The record is empty if the
    child failed.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}


def short_name(spec: str) -> str:
    """Returns a config's spec without the folder and the suffix: configs/mesanet.py:440m becomes mesanet:440m."""
    return spec.rpartition("/")[2].replace(".py", "")
