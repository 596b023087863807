"""Divides the input into units of work, independently of the number of workers."""

import concurrent.futures
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from mesanet_jax.data import files, formats
from mesanet_jax.data.files import Source
from mesanet_jax.data.formats import Part
from mesanet_jax.errors import UserError

_COMPRESSED_TEXT = 4  # rough compression ratio of English text; only affects the size of units
_FOOTERS_AT_ONCE = 16  # threads; each makes small remote reads, which mostly wait


@dataclasses.dataclass(frozen=True)
class Unit:
    """Consecutive parts of a split that one worker processes; its rows go to one file per split.

    Attributes:
      index: the number of the unit, over all splits.
      begins: whether the first document of the unit begins in it. It does unless a split is joined to one document.
      ends: whether the last document of the unit ends in it.
    """

    index: int
    split: str
    parts: tuple[Part, ...]
    begins: bool = True
    ends: bool = True

    @property
    def name(self) -> str:
        """The name of the unit in messages."""
        return f"unit {self.index} ({self.split}: {self.parts[0].name}{', ...' if len(self.parts) > 1 else ''})"


def units(
    sources: Mapping[str, Sequence[Source]], *, format: str, text_field: str, document: str, unit_mb: int
) -> list[Unit]:
    """Returns the units of all splits, each with about `unit_mb` MB of text.

    Parquet files are cut at row groups. Small files and row groups are combined.

    Args:
      sources: the files of each split, in order.

    Raises:
      UserError: the format of a file is unknown, or does not fit the config's `document`.
    """
    planned: list[Unit] = []
    for split, of_split in sources.items():
        pieces = _pieces(of_split, format=format, text_field=text_field, document=document)
        groups = list(_gather(pieces, limit=unit_mb * 1e6))
        for position, parts in enumerate(groups):
            whole = document != "join"
            begins, ends = whole or position == 0, whole or position == len(groups) - 1
            planned.append(Unit(len(planned), split, parts, begins, ends))
    return planned


def _pieces(sources: Sequence[Source], *, format: str, text_field: str, document: str) -> Iterator[tuple[Part, float]]:
    """Yields the smallest parts that the input can be divided into, each with an estimate of its bytes of text."""
    kinds = [formats.infer(source.name) if format == "auto" else format for source in sources]
    unsuitable = next((kind for kind in kinds if document in ("line", "paragraph") and kind != "text"), None)
    if unsuitable:
        raise UserError(f"config.document={document}: needs text files; for {unsuitable}, set config.document=record")
    with concurrent.futures.ThreadPoolExecutor(_FOOTERS_AT_ONCE) as pool:
        parquet = [source for source, kind in zip(sources, kinds) if kind == "parquet"]
        footers = pool.map(lambda source: _row_groups(source, text_field), parquet)
        for source, kind in zip(sources, kinds):
            if kind == "parquet":
                yield from next(footers)
            else:
                compressed = formats.plain_name(source.name) != source.name
                yield Part(source.name, kind), source.size * (_COMPRESSED_TEXT if compressed else 1)


def _row_groups(source: Source, text_field: str) -> list[tuple[Part, float]]:
    """Returns a part for each row group.

    If the file cannot be read, it becomes one part, so that the worker reports the problem in order.
    """
    try:
        with files.open_binary(source.name) as stream:
            metadata = pq.ParquetFile(stream).metadata
    except (OSError, pa.ArrowException):
        return [(Part(source.name, "parquet"), source.size)]
    groups = [metadata.row_group(index) for index in range(metadata.num_row_groups)]
    sizes = [_text_bytes(group, text_field) for group in groups]
    return [(Part(source.name, "parquet", (index, index + 1)), size) for index, size in enumerate(sizes)] or [
        (Part(source.name, "parquet"), 0)
    ]


def _text_bytes(group: pq.RowGroupMetaData, text_field: str) -> int:
    columns = [group.column(index) for index in range(group.num_columns)]
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == text_field)


def _gather(pieces: Iterator[tuple[Part, float]], *, limit: float) -> Iterator[tuple[Part, ...]]:
    group: list[Part] = []
    total = 0.0
    for part, size in pieces:
        if group and total + size > limit:
            yield _merged(group)
            group, total = [], 0.0
        group.append(part)
        total += size
    if group:
        yield _merged(group)


def _merged(parts: list[Part]) -> tuple[Part, ...]:
    """Consecutive row groups of one file become one part, so that the file is opened once."""
    merged: list[Part] = []
    for name, run in itertools.groupby(parts, key=lambda part: part.name):
        first, *others = run
        last = others[-1] if others else first
        if first.row_groups is None or last.row_groups is None:
            merged.append(first)
        else:
            merged.append(Part(name, first.format, (first.row_groups[0], last.row_groups[1])))
    return tuple(merged)
