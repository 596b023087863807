"""Processes a unit of work: reads its documents, tokenizes them and writes its rows.

The record of a unit is written last: if it exists, the unit is finished.
"""

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from mesanet_jax.data import formats, manifest, shards, tokenizer
from mesanet_jax.data.files import Directory
from mesanet_jax.data.formats import Document
from mesanet_jax.data.hashing import sha256_of_json
from mesanet_jax.data.packing import Packer, row_dtype
from mesanet_jax.data.plan import Unit
from mesanet_jax.data.pool import Report
from mesanet_jax.data.problems import Problems
from mesanet_jax.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20  # bytes of text that are tokenized at once


@dataclasses.dataclass(frozen=True)
class Job:
    """What all units of a preparation share.

    `settings_hash` is part of each unit's record, so that units of other settings are not taken for finished ones. The
    other fields are those of the config (`mesanet_jax.data.schema`).
    """

    output: str
    settings_hash: str
    tokenizer_kind: str
    text_field: str
    document: str
    holdout: float
    seq_len: int
    bos: bool
    eos: bool
    on_error: str
    max_errors: int


def record_name(unit: Unit) -> str:
    """Returns the file name of a unit's record."""
    return f"unit-{unit.index:05}.json"


def is_record(name: str) -> bool:
    """Whether a file name is that of a unit's record."""
    return name.startswith("unit-")


def shard_name(unit: Unit, split: str) -> str:
    """Returns the file name of a unit's rows of a split."""
    return f"{split}-{unit.index:05}.npy"


def unit_hash(job: Job, unit: Unit, limit: int | None) -> str:
    """Returns the hash of all that determines the rows of a unit."""
    return sha256_of_json([job.settings_hash, dataclasses.asdict(unit), limit])


def finished(job: Job, unit: Unit, *, sizes: dict[str, int], limit: int | None = None) -> dict[str, Any] | None:
    """Returns the record of a unit that an earlier run finished with the same settings, or None.

    Args:
      sizes: the files of the output directory (`Directory.sizes`).
      limit: the largest number of documents to read; None for all.
    """
    content = Directory(job.output).read(record_name(unit)) if record_name(unit) in sizes else None
    if content is None:
        return None
    record = json.loads(content)
    of_splits = [split["shard"] for split in record["splits"].values()]
    complete = all(sizes.get(shard["file"]) == shard["bytes"] for shard in of_splits)
    return record if complete and record["hash"] == unit_hash(job, unit, limit) else None


def held_out(text: str, fraction: float) -> bool:
    """Whether a document is held out for validation.

    Only its text decides, so that all copies of a document are in the same split.
    """
    return fraction > 0 and int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < fraction * 2**64


def pack_unit(job: Job, unit: Unit, report: Report, *, limit: int | None = None) -> dict[str, Any]:
    """Writes the rows of a unit, of at most `limit` documents, and returns the unit's record.

    Raises:
      UserError: the input is broken and the config says to stop, or a file cannot be written.
    """
    directory = Directory(job.output)
    tokens = load_tokenizer(directory, job.tokenizer_kind)
    problems = Problems(on_error=job.on_error, max_errors=job.max_errors)
    splits = [unit.split] + (["validation"] if job.holdout and unit.split == "train" else [])
    with contextlib.ExitStack() as stack:
        writers = {}
        for split in splits:
            stream = stack.enter_context(directory.writer(shard_name(unit, split)))
            writers[split] = _ShardWriter(stream, shard_name(unit, split), job=job, unit=unit, tokens=tokens)
        for documents in _batched(itertools.islice(_documents(job, unit, problems), limit)):
            ids = tokens.encode([document.text for document in documents])
            for document, document_ids in zip(documents, ids):
                split = splits[-1] if held_out(document.text, job.holdout) else splits[0]
                writers[split].add(document, document_ids)
            for writer in writers.values():
                writer.write_full()
            report(len(documents), sum(document.size for document in documents))
        records = {split: writer.close() for split, writer in writers.items()}
    record = {"hash": unit_hash(job, unit, limit), "splits": records, "problems": problems.record()}
    directory.write(record_name(unit), manifest.encode(record))
    return record


def load_tokenizer(directory: Directory, kind: str) -> Tokenizer:
    """Loads the tokenizer of a prepared directory from the copy in the directory.

    Raises:
      UserError: the copy is missing or broken.
    """
    name = tokenizer.KINDS[kind].file
    content = directory.read(name) if name else None
    return tokenizer.load(kind, content, name=f"{directory.path}/{name}")


def _documents(job: Job, unit: Unit, problems: Problems) -> Iterator[Document]:
    for part in unit.parts:
        for item in formats.read(part, text_field=job.text_field, document=job.document):
            if isinstance(item, Document):
                yield item
            else:
                problems.add(item)


def _batched(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.size
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _ShardWriter:
    """Writes the rows of one split of a unit to a .npy file, as they fill up."""

    def __init__(self, stream: io.BufferedRandom, name: str, *, job: Job, unit: Unit, tokens: Tokenizer):
        self._stream = stream
        self._name = name
        self._dtype = row_dtype(seq_len=job.seq_len, vocab_size=tokens.vocab_size)
        self._packer = Packer(self._dtype, pad_id=tokens.pad_id)
        self._bos = np.array([tokens.bos_id] * job.bos, np.int32)
        self._eos = np.array([tokens.eos_id] * job.eos, np.int32)
        self._joined = job.document == "join"
        self._inside = not unit.begins  # inside a document that continues
        self._ends = unit.ends
        self._record = dict.fromkeys(manifest.COUNTS, 0)
        shards.write_header(stream, self._dtype, rows=0)  # replaced when the number of rows is known

    def add(self, document: Document, ids_N: np.ndarray) -> None:
        """Appends a document, whose tokens are `ids_N`."""
        if not self._inside:
            self._append(self._bos, ids_N, starts=True)
            self._record["documents"] += 1
        else:
            self._append(ids_N, starts=False)
        self._inside = self._joined
        if not self._joined:
            self._append(self._eos, starts=False)
        self._record["text_bytes"] += document.size
        # In a joined corpus the end of a line counts as a word, as in the published counts of WikiText (its <eos>).
        self._record["words"] += len(document.text.split()) + self._joined

    def _append(self, *ids: np.ndarray, starts: bool) -> None:
        ids_N = np.concatenate(ids)
        self._packer.add(ids_N, starts=starts)
        self._record["tokens"] += len(ids_N)

    def write_full(self) -> None:
        """Writes the rows that are full."""
        self._write(self._packer.take())

    def _write(self, rows_R: np.ndarray) -> None:
        self._stream.write(rows_R.tobytes())
        self._record["rows"] += len(rows_R)

    def close(self) -> dict[str, Any]:
        """Writes the remaining tokens, and returns the counts of the split and the description of its file."""
        if self._joined and self._ends:
            self._append(self._eos, starts=False)
        self._write(self._packer.flush())
        shards.write_header(self._stream, self._dtype, rows=self._record["rows"])
        return self._record | {"shard": shards.describe(self._stream, self._name, rows=self._record["rows"])}
