"""Writes files atomically: a reader sees the old content or the new content, never a part of it.

The new content goes to a temporary file in the same directory, which is then renamed over the old file.
"""

import contextlib
import io
import os
import pathlib
import secrets
from collections.abc import Iterator

from etils import epath

_SUFFIX = ".partial"


def write_atomically(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Replaces the content of `path` by `data`, as a whole or not at all; text is encoded as UTF-8.

    A path in a bucket (`gs://...`) is written directly, because an object store shows an object only once it is whole.
    """
    content = data.encode() if isinstance(data, str) else data
    if "://" in os.fspath(path):
        epath.Path(path).write_bytes(content)
        return
    with replacing(path) as stream:
        stream.write(content)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[io.BufferedRandom]:
    """Yields a seekable binary stream whose content becomes the local file `path` when the block ends without an error.

    After an error, `path` is as it was before and the temporary file is gone. A process that is killed in the block
    leaves its temporary file behind (`is_temporary`).
    """
    target = pathlib.Path(path)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}{_SUFFIX}")
    try:
        # Not `tempfile`, whose files only their owner may read: directories are shared with other users.
        with temporary.open("x+b") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_directory(target.parent)


def is_temporary(path: str | os.PathLike[str]) -> bool:
    """Whether `path` is named like the temporary files of this module, which may be half written."""
    return pathlib.PurePath(path).suffix == _SUFFIX


def _sync_directory(directory: pathlib.Path) -> None:
    """Makes a rename in `directory` survive a power failure, where the file system supports it."""
    with contextlib.suppress(OSError):  # some network file systems refuse to sync a directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
