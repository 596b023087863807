"""Writes shards: files of packed rows in NumPy's .npy format."""

import hashlib
import io
from typing import Any

import numpy as np


def write_header(stream: io.BufferedRandom, dtype: np.dtype, *, rows: int) -> None:
    """Writes the header of a .npy file of `rows` rows to the beginning of a stream.

    NumPy pads the header, so that a header for another number of rows has the same size and can replace it.
    """
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows,)}
    stream.seek(0)
    np.lib.format.write_array_header_1_0(stream, fields)


def describe(stream: io.BufferedRandom, name: str, *, rows: int) -> dict[str, Any]:
    """Returns the manifest's entry of a complete shard: its file name, bytes, rows and SHA-256 hash."""
    stream.seek(0)
    checksum = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"file": name, "bytes": stream.seek(0, io.SEEK_END), "rows": rows, "sha256": checksum}
