"""Reads and writes local files, remote ones (`gs://`, `hf://`, `s3://`, through fsspec) and the embedded corpus.

Writing is atomic: under its name, a file is either complete or absent.
"""

import contextlib
import dataclasses
import io
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import fsspec
from fsspec.core import OpenFile, url_to_fs
from fsspec.implementations.local import LocalFileSystem

from mesanet_jax import atomic
from mesanet_jax.errors import UserError

EMBEDDED = "embedded:"
_EMBEDDED_DIR = pathlib.Path(__file__).parent / "embedded"


@dataclasses.dataclass(frozen=True)
class Source:
    """An input file: its full name and its size in bytes."""

    name: str
    size: int


def open_binary(name: str) -> BinaryIO:
    """Opens a file for reading bytes; `embedded:NAME` is a file that is part of the package."""
    if name.startswith(EMBEDDED):
        return (_EMBEDDED_DIR / name.removeprefix(EMBEDDED)).open("rb")
    return cast(OpenFile, fsspec.open(name, "rb")).open()


def read(name: str, *, field: str) -> bytes:
    """Returns the content of a file.

    Args:
      field: the config field that holds the name, for the error.

    Raises:
      UserError: the file cannot be read.
    """
    try:
        with open_binary(name) as stream:
            return stream.read()
    except (OSError, ImportError, ValueError) as error:
        raise UserError(f"{field}={name}: cannot be read: {first_line(error)}") from error


def filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the filesystem of a path and the path in it.

    Raises:
      UserError: the driver of the filesystem is unknown or not installed.
    """
    try:
        return url_to_fs(os.path.expanduser(path))
    except (ImportError, ValueError) as error:
        raise UserError(f"{path}: {first_line(error)}") from error


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    """Whether the files are on this machine."""
    return isinstance(fs, LocalFileSystem)


def expand(patterns: str, *, field: str) -> list[Source]:
    """Lists the files of a comma-separated list of paths and globs (`*`, `**`).

    The matches of each pattern are sorted, and a file that several patterns match is listed once.

    Args:
      field: the config field that holds the patterns, for the error.

    Raises:
      UserError: a pattern matches nothing, is a directory or cannot be listed.
    """
    found: dict[str, Source] = {}
    for pattern in filter(None, (item.strip() for item in patterns.split(","))):
        sources = _embedded(pattern) if pattern.startswith(EMBEDDED) else _listed(pattern)
        if not sources:
            raise UserError(f"{field}={pattern}: no such file, or no file matches the pattern")
        found.update((source.name, source) for source in sources)
    return list(found.values())


def _embedded(pattern: str) -> list[Source]:
    matches = sorted(_EMBEDDED_DIR.glob(f"{pattern.removeprefix(EMBEDDED)}.*"))
    return [Source(f"{EMBEDDED}{path.name}", path.stat().st_size) for path in matches]


def _listed(pattern: str) -> list[Source]:
    fs, path = filesystem(pattern)
    try:
        if fs.isdir(path):
            example = f"{pattern.rstrip('/')}/**/*.parquet"
            raise UserError(f"{pattern}: is a directory; name the files in it, for example {example}")
        infos = cast(dict, fs.glob(path, detail=True)).values()
    except UserError:
        raise
    except Exception as error:  # the drivers raise many types: no network, no permission, no bucket
        raise UserError(f"{pattern}: cannot be listed: {first_line(error)}") from error
    prefix = "" if is_local(fs) else f"{pattern.split('://')[0]}://"
    files = sorted((info["name"], info["size"]) for info in infos if info["type"] == "file")
    return [Source(f"{prefix}{name}", size) for name, size in files]


class Directory:
    """An output directory, local or remote, in which only complete files appear."""

    def __init__(self, path: str):
        self.path = path
        self.fs, self.root = filesystem(path)

    def join(self, name: str) -> str:
        """Returns the path of a file of the directory, as `self.fs` expects it."""
        return f"{self.root.rstrip('/')}/{name}"

    def create(self) -> None:
        """Creates the directory, and deletes files that an interrupted run left incomplete.

        Raises:
          UserError: the path is a file, or the directory cannot be created.
        """
        if self.fs.isfile(self.root):
            raise UserError(f"{self.path}: is a file; name a directory")
        with writing(self.path):
            self.fs.makedirs(self.root, exist_ok=True)
            if is_local(self.fs):
                for file in filter(atomic.is_temporary, pathlib.Path(self.root).iterdir()):
                    file.unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """Returns {file name: bytes} of the files directly in the directory, with a single request."""
        try:
            infos = self.fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in infos if info["type"] == "file"}

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file, or None if it does not exist."""
        try:
            return cast(bytes, self.fs.cat_file(self.join(name)))
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        """Deletes a file if it exists."""
        if self.fs.exists(self.join(name)):
            self.fs.rm_file(self.join(name))

    def write(self, name: str, content: bytes) -> None:
        """Writes a file."""
        with self.writer(name) as stream:
            stream.write(content)

    @contextlib.contextmanager
    def writer(self, name: str) -> Iterator[io.BufferedRandom]:
        """Opens a seekable stream; its content becomes the file `name` if the block ends without an error.

        Raises:
          UserError: the file cannot be written.
        """
        with writing(self.path):
            if is_local(self.fs):
                with atomic.replacing(self.join(name)) as stream:
                    yield stream
            else:
                with self._uploading(name) as stream:
                    yield stream

    @contextlib.contextmanager
    def _uploading(self, name: str) -> Iterator[io.BufferedRandom]:
        """Opens a temporary file and uploads it at the end; objects in a bucket appear only once they are complete."""
        with tempfile.NamedTemporaryFile() as stream:
            yield cast(io.BufferedRandom, stream)
            stream.flush()
            self.fs.put_file(stream.name, self.join(name))


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns an error of the operating system (disk full, no permission) into a UserError of one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        advice = "finished units are kept; fix the cause and run the same command again"
        raise UserError(f"{path}: cannot be written: {reason}; {advice}") from error


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type if the message is empty."""
    return (str(error).splitlines() or [type(error).__name__])[0]
