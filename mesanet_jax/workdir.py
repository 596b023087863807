"""A run's directory: whose it is, and what may differ when it is entered again."""

import contextlib
import fcntl
import os
import pathlib
from collections.abc import Iterator

import jax

from mesanet_jax import config as config_lib
from mesanet_jax import schema
from mesanet_jax.errors import UserError

CONFIG = "config.json"


@contextlib.contextmanager
def lock(workdir: pathlib.Path) -> Iterator[None]:
    """Holds the directory for one training process; the lock goes with the process, however it ends.

    Raises:
      UserError: another process trains here, or the directory cannot be written.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / "lock").open("a+")
    except OSError as error:
        raise UserError(f"--workdir={workdir}: {error.strerror or error}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(f"--workdir={workdir}: process {file.read() or '?'} is training here") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


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
