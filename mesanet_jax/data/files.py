"""Paths of every kind: local, `gs://`, `hf://`, `s3://` through fsspec, and the corpus inside the package.

Reading is by name and streams; writing is atomic: a file is either complete under its name or not there.
"""

import contextlib
import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, cast

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from mesanet_jax import atomic
from mesanet_jax.errors import UserError

EMBEDDED = "embedded:"
_EMBEDDED_DIR = pathlib.Path(__file__).parent / "embedded"


@dataclasses.dataclass(frozen=True)
class Source:
    """One input file: its full name and its size in bytes."""

    name: str
    size: int


def open_binary(name: str) -> BinaryIO:
    """The file, open for reading bytes; `embedded:NAME` is a file shipped in the package."""
    if name.startswith(EMBEDDED):
        return (_EMBEDDED_DIR / name.removeprefix(EMBEDDED)).open("rb")
    return fsspec.open(name, "rb").open()


def read(name: str, *, field: str) -> bytes:
    """The whole file. Raises UserError, naming the config `field`, where that fails."""
    try:
        with open_binary(name) as stream:
            return stream.read()
    except (OSError, ImportError, ValueError) as error:
        raise UserError(f"{field}={name}: cannot be read: {first_line(error)}") from error


def filesystem(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """The filesystem of a path and the path in it. Raises UserError where its driver is missing or unknown."""
    try:
        return url_to_fs(os.path.expanduser(path))
    except (ImportError, ValueError) as error:
        raise UserError(f"{path}: {first_line(error)}") from error


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return isinstance(fs, LocalFileSystem)


def expand(patterns: str, *, field: str) -> list[Source]:
    """The files of a comma-separated list of paths and globs (`*`, `**`), each glob in sorted order, none twice.

    Raises UserError, naming the config `field`, for a pattern that matches nothing.
    """
    found: dict[str, Source] = {}
    for pattern in filter(None, (item.strip() for item in patterns.split(","))):
        sources = _embedded(pattern) if pattern.startswith(EMBEDDED) else _listed(pattern)
        if not sources:
            raise UserError(f"{field}={pattern}: no such file, or no file matches")
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
            raise UserError(f"{pattern}: is a directory; name its files, for example {example}")
        infos = fs.glob(path, detail=True).values()
    except UserError:
        raise
    except Exception as error:  # each remote driver raises its own kinds: no network, no permission, no bucket
        raise UserError(f"{pattern}: cannot be listed: {first_line(error)}") from error
    prefix = "" if is_local(fs) else f"{pattern.split('://')[0]}://"
    files = sorted((info["name"], info["size"]) for info in infos if info["type"] == "file")
    return [Source(f"{prefix}{name}", size) for name, size in files]


class Directory:
    """An output directory, local or remote, whose files appear whole or not at all."""

    def __init__(self, path: str):
        self.path = path
        self.fs, self.root = filesystem(path)

    def join(self, name: str) -> str:
        return f"{self.root.rstrip('/')}/{name}"

    def create(self) -> None:
        """Makes the directory and clears what an interrupted run left half-written."""
        if self.fs.isfile(self.root):
            raise UserError(f"{self.path}: is a file; a directory is needed")
        with writing(self.path):
            self.fs.makedirs(self.root, exist_ok=True)
            if is_local(self.fs):
                for file in filter(atomic.is_temporary, pathlib.Path(self.root).iterdir()):
                    file.unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """{file name: bytes} of the files directly in the directory: one listing, also where it is remote."""
        try:
            infos = self.fs.ls(self.root, detail=True)
        except FileNotFoundError:
            return {}
        return {info["name"].rsplit("/", 1)[-1]: info["size"] for info in infos if info["type"] == "file"}

    def read(self, name: str) -> bytes | None:
        """The whole file, or None where there is none."""
        try:
            return self.fs.cat_file(self.join(name))
        except FileNotFoundError:
            return None

    def remove(self, name: str) -> None:
        if self.fs.exists(self.join(name)):
            self.fs.rm_file(self.join(name))

    def write(self, name: str, content: bytes) -> None:
        with self.writer(name) as stream:
            stream.write(content)

    @contextlib.contextmanager
    def writer(self, name: str) -> Iterator[BinaryIO]:
        """A seekable stream whose content becomes the file `name` when the block ends without an error."""
        with writing(self.path):
            if is_local(self.fs):
                with atomic.replacing(self.join(name)) as stream:
                    yield stream
            else:
                with self._uploading(name) as stream:
                    yield stream

    @contextlib.contextmanager
    def _uploading(self, name: str) -> Iterator[BinaryIO]:
        """As `writer`, for a remote directory: object stores show an object only once it is whole."""
        with tempfile.NamedTemporaryFile() as stream:
            yield cast(BinaryIO, stream)
            stream.flush()
            self.fs.put_file(stream.name, self.join(name))


@contextlib.contextmanager
def writing(path: str) -> Iterator[None]:
    """Turns the operating system's refusal to write (disk full, no permission) into one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or first_line(error)
        raise UserError(f"{path}: cannot be written: {reason}; finished units are kept, rerun to go on") from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
