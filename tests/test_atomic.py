"""Atomic writes: the old content or the new content, and no temporary file after an error."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest
from etils import epath

from mesanet_jax import atomic
from mesanet_jax.atomic import write_atomically


@pytest.mark.parametrize("kind", [str, pathlib.Path, epath.Path])
@pytest.mark.parametrize("data", ["naïve\n", b"\x00\xff", ""])
def test_writes_and_replaces(tmp_path, kind, data):
    path = tmp_path / "file.json"
    path.write_text("old and longer")
    write_atomically(kind(path), data)
    assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_are_those_of_an_ordinary_file(tmp_path):
    (tmp_path / "ordinary").write_text("")
    write_atomically(tmp_path / "atomic", "")
    assert (tmp_path / "atomic").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch, call):
    path = tmp_path / "file"
    path.write_text("old")

    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (pathlib.Path, "replace")), fails)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_directory_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        write_atomically(tmp_path / "missing" / "file", "new")


def test_a_crash_before_the_rename_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    program = """
import os, pathlib, signal, sys
from mesanet_jax import atomic
pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
atomic.write_atomically(sys.argv[1], "new")
"""
    assert subprocess.run([sys.executable, "-c", program, path], timeout=120).returncode == -signal.SIGKILL
    assert path.read_text() == "old"
    (left,) = set(tmp_path.iterdir()) - {path}
    assert atomic.is_temporary(left) and not atomic.is_temporary(path)


def test_a_bucket_is_written_directly(monkeypatch):
    written = []
    monkeypatch.setattr(type(epath.Path("gs://tests")), "write_bytes", lambda *call: written.append(call))
    write_atomically(epath.Path("gs://tests/run/config.json"), "new")
    assert written == [(epath.Path("gs://tests/run/config.json"), b"new")]
