"""Reads every input format as a stream of documents and problems, each with its place in the input.

Nothing is skipped silently: whatever is not a document becomes a `Problem`, and the caller decides whether it is fatal.
Parquet is read by row group and column, JSON lines and text line by line, so memory does not grow with the file.
"""

import dataclasses
import gzip
import json
import zlib
from collections.abc import Iterable, Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from mesanet_jax.data import files
from mesanet_jax.errors import UserError

_CHUNK = 1 << 20
_BOM = b"\xef\xbb\xbf"
_ENDINGS = {
    ".parquet": "parquet",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
}
_COMPRESSIONS = (".zst", ".gz")
_UNREADABLE = (OSError, EOFError, zlib.error, zstandard.ZstdError, pa.ArrowException)


@dataclasses.dataclass(frozen=True)
class Document:
    """A text, its size in UTF-8 bytes, and its place in the input."""

    text: str
    size: int
    place: str


@dataclasses.dataclass(frozen=True)
class Problem:
    """Something in the input that is not a document. `kind` is one of the constants below."""

    kind: str
    place: str
    detail: str


UNREADABLE = "unreadable file"
EMPTY_FILE = "empty file"
EMPTY_DOCUMENT = "empty document"
BAD_COLUMN = "missing or unsuitable column"
BAD_JSON = "invalid JSON"
BAD_UNICODE = "invalid Unicode"
BAD_TEXT = "missing or non-string text"
HARMLESS = (EMPTY_FILE, EMPTY_DOCUMENT)  # always counted and skipped, never fatal


@dataclasses.dataclass(frozen=True)
class Part:
    """A file in a known format; of a Parquet file, possibly only the row groups [first, end)."""

    name: str
    format: str
    row_groups: tuple[int, int] | None = None


def infer(name: str) -> str:
    """Returns the format that the ending of a file stands for; an ending for compression is ignored.

    Raises:
      UserError: the ending is unknown.
    """
    ending = "." + plain_name(name).rsplit(".", 1)[-1].lower()
    if ending not in _ENDINGS:
        raise UserError(
            f"{name}: the format does not follow from the ending; set --config.format=parquet, jsonl or text"
        )
    return _ENDINGS[ending]


def plain_name(name: str) -> str:
    """Returns the name without `.zst` or `.gz`."""
    return name.rsplit(".", 1)[0] if name.lower().endswith(_COMPRESSIONS) else name


def read(part: Part, *, text_field: str, document: str) -> Iterator[Document | Problem]:
    """Iterates over the documents and problems of a part.

    Args:
      text_field: the Parquet column or JSON key that holds the text.
      document: what a document is: "record" (a Parquet row, a JSON line or a text file), "paragraph" or "line" (of a
        text file), or "join". With "join", rows or lines are returned verbatim, blank ones included, for the caller to
        join to a single document, as the perplexities of WikiText require.
    """
    place, empty = part.name, True
    try:
        for item in _READERS[part.format](part, text_field=text_field, document=document):
            place, empty = item.place, False
            blank = isinstance(item, Document) and document != "join" and not item.text.strip()
            yield Problem(EMPTY_DOCUMENT, place, "no text") if blank else item
    except _UNREADABLE as error:
        yield Problem(UNREADABLE, place, f"reading stopped here: {files.first_line(error)}")
    else:
        if empty:
            yield Problem(EMPTY_FILE, part.name, "no documents")


def _document(raw: bytes | None, place: str) -> Document | Problem:
    if raw is None:
        return Problem(BAD_TEXT, place, "null")
    try:
        return Document(raw.decode("utf-8"), len(raw), place)
    except UnicodeDecodeError as error:
        return Problem(BAD_UNICODE, place, files.first_line(error))


def _read_parquet(part: Part, *, text_field: str, document: str) -> Iterator[Document | Problem]:
    with files.open_binary(part.name) as stream:
        parquet = pq.ParquetFile(stream)
        schema = parquet.schema_arrow
        if text_field not in schema.names:
            yield Problem(BAD_COLUMN, part.name, f"no column {text_field!r}; columns: {', '.join(schema.names)}")
            return
        if not _is_string(schema.field(text_field).type):
            kind = schema.field(text_field).type
            yield Problem(BAD_COLUMN, part.name, f"column {text_field!r} is {kind}, not string")
            return
        for group in range(*(part.row_groups or (0, parquet.num_row_groups))):
            yield from _read_row_group(part.name, parquet, group, text_field=text_field)


def _read_row_group(name: str, parquet: pq.ParquetFile, group: int, *, text_field: str) -> Iterator[Document | Problem]:
    row = 0
    for batch in parquet.iter_batches(batch_size=1024, row_groups=[group], columns=[text_field], use_threads=False):
        # As bytes, because one string that is not UTF-8 would make pyarrow reject the whole batch.
        for raw in batch.column(0).cast(pa.large_string()).cast(pa.large_binary()).to_pylist():
            yield _document(raw, f"{name} row group {group} row {row}")
            row += 1


def _is_string(kind: pa.DataType) -> bool:
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(value) or pa.types.is_large_string(value)


def _read_jsonl(part: Part, *, text_field: str, document: str) -> Iterator[Document | Problem]:
    for number, line in enumerate(_lines(_decompressed(part.name)), 1):
        if line.strip():
            yield _json_document(line, f"{part.name}:{number}", text_field=text_field)


def _json_document(line: bytes, place: str, *, text_field: str) -> Document | Problem:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Problem(BAD_UNICODE, place, files.first_line(error))
    except (ValueError, RecursionError) as error:
        return Problem(BAD_JSON, place, files.first_line(error))
    if not isinstance(record, dict) or not isinstance(record.get(text_field), str):
        keys = ", ".join(record) if isinstance(record, dict) else f"a {type(record).__name__}, not an object"
        return Problem(BAD_TEXT, place, f"{text_field!r} is missing or not a string; the line has: {keys}")
    text = record[text_field]
    try:
        return Document(text, len(text.encode("utf-8")), place)
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair; UTF-8 cannot
        return Problem(BAD_UNICODE, place, files.first_line(error))


def _read_text(part: Part, *, text_field: str, document: str) -> Iterator[Document | Problem]:
    chunks = _decompressed(part.name)
    if document == "record":
        yield _document(b"".join(_without_bom(chunks)), part.name)
        return
    for number, raw in _TEXT_UNITS[document](_lines(chunks)):
        yield _document(raw, f"{part.name}:{number}")


def _text_lines(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    return ((number, line.rstrip(b"\r\n")) for number, line in enumerate(lines, 1))


def _paragraphs(lines: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Joins consecutive lines that are not blank; yields each paragraph with the number of its first line."""
    run: list[bytes] = []
    begin = 0
    for number, line in enumerate(lines, 1):
        if line.strip():
            begin = begin if run else number
            run.append(line)
        elif run:
            yield begin, b"".join(run).rstrip(b"\r\n")
            run = []
    if run:
        yield begin, b"".join(run).rstrip(b"\r\n")


_TEXT_UNITS = {"line": _text_lines, "paragraph": _paragraphs, "join": lambda lines: enumerate(lines, 1)}
_READERS = {"parquet": _read_parquet, "jsonl": _read_jsonl, "text": _read_text}


def _decompressed(name: str) -> Iterator[bytes]:
    """Iterates over the content of a file in chunks; the ending of its name says how it is compressed."""
    with files.open_binary(name) as stream:
        if name.lower().endswith(".zst"):
            yield from _unzstd(iter(lambda: stream.read(_CHUNK), b""))
        elif name.lower().endswith(".gz"):
            plain = gzip.GzipFile(fileobj=stream)
            yield from iter(lambda: plain.read1(_CHUNK), b"")  # unlike `read`, returns what precedes a broken end
        else:
            yield from iter(lambda: stream.read(_CHUNK), b"")


def _unzstd(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Decompresses one or more zstd frames.

    Each frame is followed to its end, because `stream_reader(read_across_frames=True)` does not report a truncated one.
    """
    frame = None
    for chunk in chunks:
        while chunk:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(chunk)
            chunk, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("the file is truncated: it ends inside a zstd frame")


def _without_bom(chunks: Iterable[bytes]) -> Iterator[bytes]:
    first = True
    for chunk in filter(None, chunks):
        yield chunk.removeprefix(_BOM) if first else chunk
        first = False


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Splits chunks into lines, which keep their line ends; the last line may have none."""
    pending: list[bytes] = []  # joined once per line, because repeated joins take quadratic time on a long line
    for chunk in _without_bom(chunks):
        *whole, rest = chunk.split(b"\n")
        for line in whole:
            yield b"".join((*pending, line, b"\n"))
            pending = []
        if rest:
            pending.append(rest)
    if pending:
        yield b"".join(pending)
