"""Writes files atomically."""

import contextlib
import os
import pathlib

from etils import epath


def write_atomically(path: pathlib.Path | epath.Path, data: bytes | str) -> None:
    """Writes a file so that a reader, and a crash, sees either the old content or the new one, never a part of it.

    A local file is first written under the name `NAME.partial` in the same directory, flushed to the disk, and then
    renamed. An object in a bucket (`gs://...`) is written directly: it appears only once it is complete.

    Args:
      data: the whole content; text is encoded as UTF-8.
    """
    content = data.encode() if isinstance(data, str) else data
    if "://" in str(path):
        path.write_bytes(content)
        return
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    with contextlib.suppress(OSError):  # some filesystems cannot synchronise a directory; the file is intact anyway
        _synchronise_directory(path.parent)


def _synchronise_directory(path: pathlib.Path | epath.Path) -> None:
    """Makes a rename in the directory survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
