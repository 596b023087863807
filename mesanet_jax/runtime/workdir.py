"""The directory of a run, local or in a bucket: which run it holds, and what may change when the run is resumed."""

import contextlib
import fcntl
import importlib.util
import os
import socket
import time
from collections.abc import Iterator
from typing import IO

import fsspec.config
import jax
from etils import epath

from mesanet_jax import config as config_lib
from mesanet_jax import schema
from mesanet_jax.atomic import write_atomically
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import distributed
from mesanet_jax.schema import Config

CONFIG, LOCK = "config.json", "lock"


def path(name: str) -> epath.Path:
    """Returns the directory of `--workdir=name`; gs://BUCKET/... is used in the same way as a local directory.

    Raises:
      UserError: checkpoints cannot be written to this kind of URL, or the package for gs:// is missing.
    """
    scheme = name.partition("://")[0] if "://" in name else None
    if scheme not in (None, "gs"):
        raise UserError(f"--workdir={name}: must be a local directory or gs://BUCKET/...")
    if scheme == "gs":
        if importlib.util.find_spec("gcsfs") is None:
            raise UserError(f"--workdir={name}: needs the package gcsfs: pip install mesanet-jax[gcs]")
        # By default gcsfs remembers the content of a directory, but other processes write to it.
        fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    return epath.Path(name)


def is_local(workdir: epath.Path) -> bool:
    """Whether a directory is on a file system rather than in a bucket."""
    return "://" not in str(workdir)


def absolute(workdir: epath.Path) -> epath.Path:
    """Returns the absolute path, which Orbax and jax need; `resolve` would take a path in a bucket for a local one."""
    return epath.Path(workdir).resolve() if is_local(workdir) else workdir


@contextlib.contextmanager
def lock(workdir: epath.Path) -> Iterator[None]:
    """Reserves the directory for one training run, and checks that all processes of the run use the same directory.

    The lock is released when its process ends, however it ends. A bucket has no locks.

    Raises:
      UserError: another run trains here, the directory cannot be written, or it is not the same for all processes.
    """
    if distributed.is_chief():
        with _locked(workdir) as holder:
            distributed.publish("lock", holder)
            yield
    else:
        if not _appears(workdir / LOCK, distributed.await_value("lock")):
            raise UserError(
                f"--workdir={workdir}: this is not the directory that process 0 writes to; all processes need the same"
                " directory, on a file system that their hosts share"
            )
        yield


@contextlib.contextmanager
def _locked(workdir: epath.Path) -> Iterator[str]:
    """Holds the lock, and yields the text of its file, which names the holder."""
    holder = f"{os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with contextlib.ExitStack() as stack:
        with _one_line_errors(workdir):
            if is_local(workdir):  # a bucket has no directories, and gcsfs would create a bucket of a misspelt name
                workdir.mkdir(parents=True, exist_ok=True)
                _flock(stack.enter_context((workdir / LOCK).open("a")), workdir)
            (workdir / LOCK).write_text(holder)
        yield holder


def _flock(file: IO, workdir: epath.Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = (workdir / LOCK).read_text() or "?"
        raise UserError(f"--workdir={workdir}: process {holder} is training here") from None


def _appears(path: epath.Path, text: str, *, seconds: float = 10.0) -> bool:
    """Whether a file contains `text` within a few seconds, since a network file system may show it late."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.is_file() and path.read_text() == text:
            return True
        time.sleep(0.2)
    return False


def check(workdir: epath.Path, config: Config, *, begun: bool) -> list[str]:
    """Checks that the directory holds no other run.

    Args:
      begun: whether a checkpoint exists; before the first one, the directory is not bound to a config.

    Returns:
      A line for each field that differs from the saved config and may differ.

    Raises:
      UserError: the directory holds a run that differs in a field that may not differ.
    """
    saved = workdir / CONFIG
    if not begun or not saved.exists():
        return []
    refused, reported = config_lib.differences(schema.read_json(saved), config)
    if refused:
        raise UserError(
            f"{workdir} holds another run: {'; '.join(refused)}; choose another --workdir, or use the same values"
        )
    return reported


def save(workdir: epath.Path, config: Config) -> None:
    """Writes the resolved config; call this once the run is known to be valid."""
    with _one_line_errors(workdir):
        write_atomically(workdir / CONFIG, schema.to_json(config))


@contextlib.contextmanager
def _one_line_errors(workdir: epath.Path) -> Iterator[None]:
    """Turns the errors of a file system or a bucket into a UserError."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the libraries for buckets raise their own exception types
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, FileNotFoundError) and not is_local(workdir):
            reason = "there is no such bucket"
        raise UserError(f"--workdir={workdir}: {reason}") from error


def use_compile_cache(workdir: epath.Path, config: Config) -> None:
    """Keeps compiled programs in the workdir, so that a resumed run, an evaluation or a sample need not compile."""
    if config.compile_cache is not None:
        cache = epath.Path(config.compile_cache)
        cache = cache if cache.is_absolute() else workdir / cache
        jax.config.update("jax_compilation_cache_dir", str(absolute(cache)))


def load(workdir: epath.Path, overrides: dict[str, str]) -> Config:
    """Returns the checked config that a workdir was trained with, with overrides applied.

    Raises:
      UserError: the directory holds no run, or its file is not a config.
    """
    path = workdir / CONFIG
    with _one_line_errors(workdir):
        found = path.is_file()
    if not found:
        raise UserError(f"--workdir={workdir}: contains no run of mesanet_jax.train ({CONFIG} is missing)")
    return config_lib.from_saved(schema.read_json(path), overrides, origin=str(path))
