"""One unit of work: read its documents, tokenise them, write its rows and, last, the record that says it is done."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import numpy as np

from mesanet_jax.data import formats, manifest, tokenizer
from mesanet_jax.data.files import Directory
from mesanet_jax.data.formats import Document
from mesanet_jax.data.packing import Packer, row_dtype
from mesanet_jax.data.plan import Unit
from mesanet_jax.data.pool import Report
from mesanet_jax.data.problems import Problems
from mesanet_jax.data.tokenizer import Tokenizer

_BATCH_BYTES = 1 << 20  # text tokenised at a time


@dataclasses.dataclass(frozen=True)
class Job:
    """What all units of one preparation share. `settings_hash` ties their records to it."""

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
    return f"unit-{unit.index:05}.json"


def is_record(name: str) -> bool:
    return name.startswith("unit-")


def shard_name(unit: Unit, split: str) -> str:
    return f"{split}-{unit.index:05}.npy"


def unit_hash(job: Job, unit: Unit, limit: int | None) -> str:
    return manifest.digest([job.settings_hash, dataclasses.asdict(unit), limit])


def finished(job: Job, unit: Unit, *, sizes: dict[str, int], limit: int | None = None) -> dict[str, Any] | None:
    """The record of a unit done by an earlier run under the same settings, or None; `sizes` is the output's listing."""
    if record_name(unit) not in sizes:
        return None
    record = json.loads(Directory(job.output).read(record_name(unit)))
    shards = [split["shard"] for split in record["splits"].values()]
    whole = all(sizes.get(shard["file"]) == shard["bytes"] for shard in shards)
    return record if whole and record["hash"] == unit_hash(job, unit, limit) else None


def held_out(text: str, fraction: float) -> bool:
    """Whether a document is for validation: by its text alone, so that copies of it stay on one side."""
    return fraction > 0 and int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) < fraction * 2**64


def pack_unit(job: Job, unit: Unit, report: Report, *, limit: int | None = None) -> dict[str, Any]:
    """Does a unit, at most `limit` documents of it, and returns its record."""
    directory = Directory(job.output)
    tokens = load_tokenizer(directory, job.tokenizer_kind)
    problems = Problems(on_error=job.on_error, max_errors=job.max_errors)
    splits = [unit.split] + (["validation"] if job.holdout and unit.split == "train" else [])
    with contextlib.ExitStack() as stack:
        shards = {}
        for split in splits:
            stream = stack.enter_context(directory.writer(shard_name(unit, split)))
            shards[split] = _Shard(stream, shard_name(unit, split), job=job, unit=unit, tokens=tokens)
        for documents in _batched(itertools.islice(_documents(job, unit, problems), limit)):
            ids = tokens.encode([document.text for document in documents])
            for document, document_ids in zip(documents, ids):
                split = splits[-1] if held_out(document.text, job.holdout) else splits[0]
                shards[split].add(document, document_ids)
            for shard in shards.values():
                shard.write_full()
            report(len(documents), sum(document.size for document in documents))
        records = {split: shard.close() for split, shard in shards.items()}
    record = {"hash": unit_hash(job, unit, limit), "splits": records, "problems": problems.record()}
    directory.write(record_name(unit), manifest.encode(record))
    return record


def load_tokenizer(directory: Directory, kind: str) -> Tokenizer:
    """The tokenizer of a prepared directory, from its copy in it."""
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


class _Shard:
    """The rows of one split in one unit, written to a .npy file as they fill up."""

    def __init__(self, stream: BinaryIO, name: str, *, job: Job, unit: Unit, tokens: Tokenizer):
        self._stream = stream
        self._name = name
        self._dtype = row_dtype(seq_len=job.seq_len, vocab_size=tokens.vocab_size)
        self._packer = Packer(self._dtype, pad_id=tokens.pad_id)
        self._bos = np.array([tokens.bos_id] * job.bos, np.int32)
        self._eos = np.array([tokens.eos_id] * job.eos, np.int32)
        self._joined = job.document == "join"
        self._inside = not unit.begins  # of a document that goes on
        self._ends = unit.ends
        self._record = dict.fromkeys(manifest.COUNTS, 0)
        self._write_header()

    def _write_header(self) -> None:
        # numpy pads the header so that another row count fits in the same bytes: it is written again at the end.
        fields = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False}
        self._stream.seek(0)
        np.lib.format.write_array_header_1_0(self._stream, {**fields, "shape": (self._record["rows"],)})

    def add(self, document: Document, ids_N: np.ndarray) -> None:
        if not self._inside:
            self._append(self._bos, ids_N, starts=True)
            self._record["documents"] += 1
        else:
            self._append(ids_N, starts=False)
        self._inside = self._joined
        if not self._joined:
            self._append(self._eos, starts=False)
        self._record["text_bytes"] += document.size
        # The line end of a joined corpus is a word, as in the published counts of WikiText (its <eos>).
        self._record["words"] += len(document.text.split()) + self._joined

    def _append(self, *ids: np.ndarray, starts: bool) -> None:
        ids_N = np.concatenate(ids)
        self._packer.add(ids_N, starts=starts)
        self._record["tokens"] += len(ids_N)

    def write_full(self) -> None:
        self._write(self._packer.take())

    def _write(self, rows_R: np.ndarray) -> None:
        self._stream.write(rows_R.tobytes())
        self._record["rows"] += len(rows_R)

    def close(self) -> dict[str, Any]:
        """Writes what is left and describes the file."""
        if self._joined and self._ends:
            self._append(self._eos, starts=False)
        self._write(self._packer.flush())
        self._write_header()
        self._stream.seek(0)
        checksum = hashlib.file_digest(self._stream, "sha256").hexdigest()
        shard = {"file": self._name, "bytes": self._stream.seek(0, 2), "rows": self._record["rows"], "sha256": checksum}
        return self._record | {"shard": shard}
