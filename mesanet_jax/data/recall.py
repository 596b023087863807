"""Makes rows of delayed recall, in which a few tokens can only be predicted by remembering others.

Each row is a document of random filler. It contains pairs of a key and a value and, `delay` tokens later, the same
pairs again. The values of the repetition are the answers, and only answers count as targets. The keys of a row differ
from each other, and its values are drawn independently: an answer costs ln(symbols) nats without memory and nothing
with it.

L layers of windows of W tokens see at most the L (W - 1) tokens before the last one. (Maglev, arXiv 2608.02870, reaches
10,220 tokens in this way.) The last token before an answer is delay - 1 tokens behind its value, so windows alone stay
at ln(symbols) if the delay is L (W - 1) + 2 or more.

If all rows have the same delay, a model need not remember anything: one that sees the whole past, like the prefill of
Maglev, can fetch the value by its distance when the answer is due, and a decoder that sees only windows may never learn
to carry it. If the training rows have many delays (`shortest_delay`), the distance does not tell when an answer is due,
and windows learn the short delays first. The validation rows always have the full `delay`.

Shape suffixes: R rows, L tokens of a row (seq_len + 1), P pairs.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from mesanet_jax import schema
from mesanet_jax.data import manifest, packing, shards
from mesanet_jax.data.files import Directory
from mesanet_jax.data.schema import SCHEMA as PREPARE_SCHEMA
from mesanet_jax.data.tokenizer import Bytes
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config, Field

# Tokens are printable bytes, so that rows can be read: `qhzA7mc ... A7 ...`.
FILLER, KEYS, VALUES = (
    np.frombuffer(text, np.uint8)
    for text in (b"abcdefghijklmnopqrstuvwxyz", b"ABCDEFGHIJKLMNOPQRSTUVWXYZ", b"0123456789!#$%&()*+,-./:;<=>?@[]^")
)

SCHEMA = {
    "output": Field("", "directory to write the rows and manifest.json to; local or remote"),
    "seq_len": Field(1024, "tokens that each row trains on; a row holds one token more", at_least=8),
    "delay": Field(512, "tokens from a value to its answer", at_least=2),
    "shortest_delay": Field(
        None,
        "draw the delays of the training rows uniformly from this to `delay`; none: all rows have `delay`",
        kind=int,
        at_least=2,
    ),
    "pairs": Field(4, "pairs of a key and a value in each row", at_least=1),
    "symbols": Field(16, f"number of different values, at most {len(VALUES)}", at_least=2),
    "train_rows": Field(100_000, "rows of the training split", at_least=1),
    "validation_rows": Field(1_000, "rows of the validation split", at_least=1),
    "seed": Field(0, "seed of all rows", at_least=0),
}

_SPLITS = ("train", "validation")
_ROWS_AT_ONCE = 1024


def check(config: Config) -> None:
    """Checks each field and their combination.

    Raises:
      UserError: a value is invalid, or no row can hold such a task.
    """
    schema.check(config, SCHEMA)
    if not config.output:
        raise UserError("config.output: is empty; name the directory to write, as --config.output=DIR")
    for field, known in (("pairs", KEYS), ("symbols", VALUES)):
        if config[field] > len(known):
            raise UserError(f"config.{field}={config[field]}: must be at most {len(known)}, because there are no more")
    length = 2 * config.pairs
    for field in ("delay", "shortest_delay"):
        if (config[field] or length) < length:
            raise UserError(
                f"config.{field}={config[field]}: must be at least {length}, or the pairs overlap with their repetition"
            )
    if (config.shortest_delay or 0) > config.delay:
        raise UserError(f"config.shortest_delay={config.shortest_delay}: must be at most config.delay={config.delay}")
    if config.delay + length > config.seq_len + 1:
        need = config.delay + length - 1
        raise UserError(f"config.seq_len={config.seq_len}: must be at least {need}, to hold {config.pairs} pairs twice")


def rows(config: Config, split: str) -> Iterator[np.ndarray]:
    """Iterates over the rows of a split in order, as arrays [R] of `packing.row_dtype` with answers.

    The rows depend on the config only.
    """
    count = config[f"{split}_rows"]
    shortest = config.shortest_delay if split == "train" else None
    for part, first in enumerate(range(0, count, _ROWS_AT_ONCE)):
        rng = np.random.default_rng([config.seed, _SPLITS.index(split), part])
        yield _rows(config, min(_ROWS_AT_ONCE, count - first), shortest or config.delay, rng=rng)


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
    """Writes both splits in the form of `mesanet_jax.prepare`, and returns the manifest.

    Raises:
      UserError: the task is impossible, or the directory holds other rows.
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
    """Writes the file of a split; returns its counts and the description of its file."""
    name, count = f"{split}-00000.npy", config[f"{split}_rows"]
    with directory.writer(name) as stream:
        shards.write_header(stream, _dtype(config), rows=count)
        for part in rows(config, split):
            stream.write(part.tobytes())
        shard = shards.describe(stream, name, rows=count)
    tokens = count * (config.seq_len + 1)
    return {"documents": count, "text_bytes": tokens, "words": 0, "tokens": tokens, "rows": count, "shard": shard}
