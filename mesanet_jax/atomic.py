"""Writes files atomically."""

import os
import pathlib

from etils import epath


def write_atomically(path: pathlib.Path | epath.Path, data: bytes | str) -> None:
    """Writes a file so that a reader or a crash sees either the old content or the new one, never a part of it.

    The data go to a file beside it, `NAME.partial`, are flushed to the disk, and the file is renamed.
    """
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
        file.flush()
        if "://" not in str(path):  # an object in a bucket is durable once it is closed
            os.fsync(file.fileno())
    partial.replace(path)
