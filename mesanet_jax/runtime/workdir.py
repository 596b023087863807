"""A run's directory, local or in a bucket: whose it is, and what may differ when it is entered again."""

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
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import distributed

CONFIG, LOCK = "config.json", "lock"


def path(name: str) -> epath.Path:
    """The directory that `--workdir=name` means; gs://BUCKET/... is used as a local one is.

    Raises:
      UserError: a scheme that checkpoints cannot be written to, or the package for gs:// is missing.
    """
    scheme = name.partition("://")[0] if "://" in name else None
    if scheme not in (None, "gs"):
        raise UserError(f"--workdir={name}: is neither a local directory nor gs://BUCKET/...")
    if scheme == "gs":
        if importlib.util.find_spec("gcsfs") is None:
            raise UserError(f"--workdir={name}: needs gcsfs: pip install mesanet-jax[gcs]")
        # gcsfs would remember what a directory held; other processes write to it.
        fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
    return epath.Path(name)


def is_local(workdir: epath.Path) -> bool:
    return "://" not in str(workdir)


def absolute(workdir: epath.Path) -> epath.Path:
    """As Orbax and jax want it; `resolve` of a path in a bucket would take it for a local one."""
    return epath.Path(workdir).resolve() if is_local(workdir) else workdir


@contextlib.contextmanager
def lock(workdir: epath.Path) -> Iterator[None]:
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
def _held(workdir: epath.Path) -> Iterator[str]:
    """The lock, as what its file says about its holder. A bucket has no locks: there it only says who came last."""
    holder = f"{os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    with contextlib.ExitStack() as stack:
        with _named_failure(workdir):
            if is_local(workdir):  # a bucket has no directories, and gcsfs would make a bucket of a misspelt name
                workdir.mkdir(parents=True, exist_ok=True)
                _flock(stack.enter_context((workdir / LOCK).open("a")), workdir)
            (workdir / LOCK).write_text(holder)
        yield holder


def _flock(file: IO, workdir: epath.Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = (workdir / LOCK).read_text() or "?"
        raise UserError(f"--workdir={workdir}: process {text} is training here") from None


def _appears(path: epath.Path, text: str, *, seconds: float = 10.0) -> bool:
    """Whether a file says `text`; a network file system may show it a little late."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if path.is_file() and path.read_text() == text:
            return True
        time.sleep(0.2)
    return False


def check(workdir: epath.Path, config, *, begun: bool) -> list[str]:
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


def save(workdir: epath.Path, config) -> None:
    """Writes the resolved config, once nothing speaks against this run any more."""
    saved = workdir / CONFIG
    partial = saved.with_suffix(".partial")
    with _named_failure(workdir):
        partial.write_text(schema.to_json(config))
        partial.replace(saved)


@contextlib.contextmanager
def _named_failure(workdir: epath.Path) -> Iterator[None]:
    """Turns what a file system or a bucket refuses into one line; a bucket's libraries raise their own kinds."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, FileNotFoundError) and not is_local(workdir):
            reason = "there is no such bucket"
        raise UserError(f"--workdir={workdir}: {reason}") from error


def use_compile_cache(workdir: epath.Path, config) -> None:
    """Keeps compiled programs in the workdir, so that a resumed run, an evaluation or a sample starts at once."""
    if config.compile_cache is not None:
        cache = epath.Path(config.compile_cache)
        cache = cache if cache.is_absolute() else workdir / cache
        jax.config.update("jax_compilation_cache_dir", str(absolute(cache)))


def load(workdir: epath.Path, overrides: dict[str, str]):
    """The checked config that a workdir was trained with, plus overrides.

    Raises:
      UserError: no run there, or a file that is not a config.
    """
    path = workdir / CONFIG
    with _named_failure(workdir):
        found = path.is_file()
    if not found:
        raise UserError(f"--workdir={workdir}: no {CONFIG} here, so no run of mesanet_jax.train")
    return config_lib.from_saved(schema.read_json(path), overrides, origin=str(path))
