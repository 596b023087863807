"""Delayed recall: rows in which a few tokens can only be predicted by remembering others, a given distance before.

A row is one document of random filler. Somewhere in it stand pairs of a key and a value, `delay` tokens later the same pairs
again; the values of the second time are the answers, and only they count as targets. A row's keys differ from each other,
values are drawn independently: an answer costs ln(symbols) nats without memory, and nothing with it.

What L layers of windows of W tokens read lies at most L (W - 1) tokens before the last one read (Maglev, arXiv 2608.02870,
reaches 10,220 so). The last token before an answer is delay - 1 tokens behind its value, so with a delay of L (W - 1) + 2 or
more, windows alone stay at ln(symbols).

Where all rows have one delay, nothing has to be carried: what sees the whole past, as Maglev's prefiller does, can fetch the
value by its distance when the answer is due, and a decoder that sees windows alone may never learn to. Training rows of many delays
(`shortest_delay`) do not say when an answer is due, and windows alone learn the short ones first. Validation rows have `delay`.

R rows, L tokens in a row (seq_len + 1), P pairs.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from mesanet_jax import schema
from mesanet_jax.data import manifest, packing
from mesanet_jax.data.files import Directory
from mesanet_jax.data.schema import SCHEMA as PREPARE_SCHEMA
from mesanet_jax.data.tokenizer import Bytes
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config, Field

# Tokens are bytes that can be read: `qhzA7mc ... A7 ...`.
FILLER, KEYS, VALUES = (
    np.frombuffer(text, np.uint8)
    for text in (b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"0123456789!#$%&()*+,-./:;<=>?@[]^")
)

SCHEMA = {
    "output": Field("", "directory to write: rows and manifest.json"),
    "seq_len": Field(1024, "tokens a row is trained on; rows hold one more", at_least=8),
    "delay": Field(512, "tokens from a value to its answer", at_least=2),
    "shortest_delay": Field(None, "training rows have delays from this to `delay`, drawn evenly; none: all have `delay`", kind=int, at_least=2),
    "pairs": Field(4, "pairs of a key and a value to remember in a row", at_least=1),
    "symbols": Field(16, f"symbols that values are drawn from, at most {len(VALUES)}", at_least=2),
    "train_rows": Field(100_000, "rows of the training split", at_least=1),
    "validation_rows": Field(1_000, "rows of the validation split", at_least=1),
    "seed": Field(0, "seed of every row", at_least=0),
}  # fmt: skip

_SPLITS = ("train", "validation")
_AT_ONCE = 1024  # rows


def check(config: Config) -> None:
    """Raises UserError for a task that no row can hold."""
    schema.check(config, SCHEMA)
    if not config.output:
        raise UserError("config.output: is empty; name the directory to write, as --config.output=DIR")
    for field, known in (("pairs", KEYS), ("symbols", VALUES)):
        if config[field] > len(known):
            raise UserError(f"config.{field}={config[field]}: there are {len(known)}")
    length = 2 * config.pairs
    for field in ("delay", "shortest_delay"):
        if (config[field] or length) < length:
            raise UserError(
                f"config.{field}={config[field]}: must be at least {length}, or the pairs' two places overlap"
            )
    if (config.shortest_delay or 0) > config.delay:
        raise UserError(f"config.shortest_delay={config.shortest_delay}: is longer than config.delay={config.delay}")
    if config.delay + length > config.seq_len + 1:
        need = config.delay + length - 1
        raise UserError(f"config.seq_len={config.seq_len}: must be at least {need}, for {config.pairs} pairs twice")


def rows(config: Config, split: str) -> Iterator[np.ndarray]:
    """The rows of a split in order, a part at a time, [R] of `packing.row_dtype` with answers; the same for a seed always."""
    count = config[f"{split}_rows"]
    shortest = config.shortest_delay if split == "train" else None
    for part, first in enumerate(range(0, count, _AT_ONCE)):
        rng = np.random.default_rng([config.seed, _SPLITS.index(split), part])
        yield _rows(config, min(_AT_ONCE, count - first), shortest or config.delay, rng=rng)


def _rows(config: Config, count: int, shortest: int, *, rng: np.random.Generator) -> np.ndarray:
    length, longest = config.seq_len + 1, config.delay
    delay_R1 = longest if shortest == longest else rng.integers(shortest, longest, size=(count, 1), endpoint=True)
    keys_RP = rng.permuted(np.tile(KEYS, (count, 1)), axis=1)[:, : config.pairs]
    values_RP = VALUES[rng.integers(config.symbols, size=(count, config.pairs))]
    pairs = np.stack([keys_RP, values_RP], axis=-1).reshape(count, -1)
    onset_R1 = rng.integers(length - delay_R1 - pairs.shape[1] + 1, size=(count, 1))
    place = onset_R1 + np.arange(pairs.shape[1])
    tokens_RL = FILLER[rng.integers(len(FILLER), size=(count, length))]
    for shift in (0, delay_R1):
        np.put_along_axis(tokens_RL, place + shift, pairs, axis=1)
    answers_RL = np.zeros((count, length), bool)
    np.put_along_axis(answers_RL, place[:, 1::2] + delay_R1, True, axis=1)

    made = np.zeros(count, _dtype(config))
    made["tokens"], made["length"] = tokens_RL, length
    made["starts"] = packing.bits(np.arange(length) == np.zeros((count, 1)))
    made["answers"] = packing.bits(answers_RL)
    return made


def _dtype(config: Config) -> np.dtype:
    return packing.row_dtype(seq_len=config.seq_len, vocab_size=Bytes.vocab_size, answers=True)


def write(config: Config) -> dict[str, Any]:
    """Writes both splits as `mesanet_jax.prepare` would, and returns the manifest.

    Raises UserError for an impossible task, and where the directory holds other rows.
    """
    check(config)
    directory = Directory(config.output)
    directory.create()
    settings = {name: value for name, value in config.items() if name != "output"}
    if directory.read(manifest.NAME) is not None:
        before = manifest.read(directory)
        if before["settings"] != settings:
            raise UserError(f"{config.output}: holds other rows; choose another config.output or delete it")
        return before
    record = {
        "problems": {"counts": {}, "places": []},
        "splits": {split: _write(config, directory, split) for split in _SPLITS},
    }
    described = schema.build(PREPARE_SCHEMA)
    described.update_from_flattened_dict(
        {"output": config.output, "seq_len": config.seq_len, "bos": False, "tokenizer.kind": "bytes"}
    )
    done = manifest.build([record], config=described, settings=settings, tokens=Bytes()) | {"answers": True}
    directory.write(manifest.NAME, manifest.encode(done))
    return done


def _write(config: Config, directory: Directory, split: str) -> dict[str, Any]:
    """The file of a split: what the manifest says of it."""
    name, count, dtype = f"{split}-00000.npy", config[f"{split}_rows"], _dtype(config)
    with directory.writer(name) as stream:
        descr = np.lib.format.dtype_to_descr(dtype)
        np.lib.format.write_array_header_1_0(stream, {"descr": descr, "fortran_order": False, "shape": (count,)})
        for part in rows(config, split):
            stream.write(part.tobytes())
        stream.seek(0)
        checksum = hashlib.file_digest(stream, "sha256").hexdigest()
        shard = {"file": name, "bytes": stream.seek(0, 2), "rows": count, "sha256": checksum}
    tokens = count * (config.seq_len + 1)
    return {"documents": count, "text_bytes": tokens, "words": 0, "tokens": tokens, "rows": count, "shard": shard}
