"""A run's directory: whose it is, and what may differ when it is entered again."""

import contextlib
import fcntl
import os
import pathlib
import socket
import time
from collections.abc import Iterator

import jax

from mesanet_jax import config as config_lib
from mesanet_jax import distributed, schema
from mesanet_jax.errors import UserError

CONFIG, LOCK = "config.json", "lock"


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the directory for one training run, whose processes all see it; the lock goes with them, however they end.

    Raises:
      UserError: another run trains here, the directory cannot be written, or is not the same one for all processes.
    """
    if distributed.is_chief():
        with _held(workdir) as holder:
            distributed.from_chief("lock", holder)
            yield
    else:
        holder = distributed.from_chief("lock")
        if not _appears(workdir / LOCK, holder):
            raise UserError(
                f"--workdir={workdir}: not the directory that process 0 writes to; all processes need the same one, on a"
                " file system that their hosts share"
            )
        yield


@contextlib.contextmanager
def _held(workdir: pathlib.Path) -> Iterator[str]:
    """The lock, as what its file says about its holder."""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / LOCK).open("a+")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"--workdir={workdir}: process {file.read() or '?'} is training here") from None
        file.truncate(0)
        holder = f"{os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
        file.write(holder)
        file.flush()
        yield holder


def _appears(path: pathlib.Path, text: str, *, seconds: float = 10.0) -> bool:
    """Whether a file says `text`; a network file system may show it a little late."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.is_file() and path.read_text() == text:
            return True
        time.sleep(0.2)
    return False


def check(workdir: pathlib.Path, config, *, begun: bool) -> list[str]:
    """Checks that the directory holds no other run than this.

    `begun` says whether a checkpoint exists: before the first one nothing binds the directory to its config.

    Returns:
      One line for each harmless field that differs from the saved config.

    Raises:
      UserError: the directory holds a run that differs where it may not.
    """
    saved = workdir / CONFIG
    if not begun or not saved.exists():
        return []
    refused, reported = config_lib.differences(schema.read_json(saved), config)
    if refused:
        raise UserError(
            f"{workdir} holds another run: {'; '.join(refused)}; choose another --workdir, or the same values"
        )
    return reported


def save(workdir: pathlib.Path, config) -> None:
    """Writes the resolved config, once nothing speaks against this run any more."""
    saved = workdir / CONFIG
    partial = saved.with_suffix(".partial")
    try:
        partial.write_text(schema.to_json(config))
        partial.replace(saved)
    except OSError as error:
        raise UserError(f"--workdir={workdir}: {error.strerror or error}") from error


def use_compile_cache(workdir: pathlib.Path, config) -> None:
    """Keeps compiled programs in the workdir, so that a resumed run, an evaluation or a sample starts at once."""
    if config.compile_cache is not None:
        jax.config.update("jax_compilation_cache_dir", str((workdir / config.compile_cache).resolve()))


def load(workdir: pathlib.Path, overrides: dict[str, str]):
    """The checked config that a workdir was trained with, plus overrides.

    Raises:
      UserError: no run there, or a file that is not a config.
    """
    path = workdir / CONFIG
    if not path.is_file():
        raise UserError(f"--workdir={workdir}: no {CONFIG} here, so no run of mesanet_jax.train")
    return config_lib.from_saved(schema.read_json(path), overrides, origin=str(path))
