"""Provides small corpora and configs for the tests of the data pipeline."""

import hashlib
import json
import os
import pathlib
import random
import sys

import numpy as np
import zstandard

from mesanet_jax import schema
from mesanet_jax.data import formats, packing
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.data.schema import SCHEMA

ROOT = pathlib.Path(__file__).parents[2]

ALPHABETS = (
    "abcdefghij   ",
    "  \t\n\r\n",
    "éüßñçœ",
    "日本語中文한국",
    "😀👩‍👩‍👧🇫🇷",
    "\u2581\u00a0\u3000\ufeff\u0000\u0301",
    "0123456789.,;!?",
)


def random_text(rng: random.Random, length: int) -> str:
    """Returns text in several scripts with white space, combining marks and sentencepiece's space symbol."""
    return "x" + "".join(rng.choice(rng.choice(ALPHABETS)) for _ in range(length))


def random_texts(seed: int, count: int, *, longest: int = 300) -> list[str]:
    rng = random.Random(seed)
    return [random_text(rng, rng.randrange(longest)) for _ in range(count)]


def write_jsonl(path: pathlib.Path, texts: list[str]) -> pathlib.Path:
    """Writes a file in the style of SlimPajama, compressed if its name ends in .zst."""
    lines = [json.dumps({"text": text, "meta": {"redpajama_set_name": "Test"}}) + "\n" for text in texts]
    content = "".join(lines).encode()
    path.write_bytes(zstandard.ZstdCompressor().compress(content) if path.suffix == ".zst" else content)
    return path


def make_config(**overrides):
    """Returns a config with a bytes tokenizer and short rows; nested fields are written as `tokenizer__kind`."""
    config = schema.build(SCHEMA)
    values = {"tokenizer.kind": "bytes", "seq_len": 32, "workers": 1}
    for path, value in overrides.items():
        values[path.replace("__", ".")] = str(value) if isinstance(value, pathlib.Path) else value
    config.update_from_flattened_dict(values)
    return config


def austen_texts() -> list[str]:
    part = formats.Part("embedded:austen-train.jsonl.zst", "jsonl")
    return [item.text for item in formats.read(part, text_field="text", document="record")]


def file_hashes(directory: pathlib.Path) -> dict[str, str]:
    """Returns {file name: SHA-256 hash} of a directory."""
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def documents(output: pathlib.Path, split: str = "train") -> list[str]:
    """Decodes the documents of a prepared split, unit by unit, because each unit ends in padding."""
    rows = PackedRows(str(output), split)
    found = []
    for shard in rows.manifest["splits"][split]["shards"]:
        found += packing.documents(np.load(output / shard["file"]))
    return [rows.tokenizer.decode(ids) for ids in found]


def corpus(tmp_path: pathlib.Path, *, files: int = 3, each: int = 40) -> list[str]:
    """Writes files of random texts and returns the texts."""
    texts = []
    for number in range(files):
        written = [text for text in random_texts(number, each) if text.strip()]
        write_jsonl(tmp_path / f"in-{number}.jsonl.zst", written)
        texts += written
    return texts


def command(output: pathlib.Path, settings: dict, *more: str) -> list[str]:
    """Returns the command line of a preparation."""
    flags = [f"--config.{path.replace('__', '.')}={value}" for path, value in settings.items()]
    config = f"--config={ROOT}/configs/prepare.py:slimpajama"
    always = [f"--config.output={output}", "--config.seq_len=32"]
    return [sys.executable, "-m", "mesanet_jax.prepare", config, *always, *flags, *more]


class Item:
    """A named piece of work for `pool.run`."""

    def __init__(self, name: str):
        self.name = name


def die_on_second(item: Item, report) -> str:
    """A task whose process dies suddenly, as when the operating system runs out of memory."""
    if item.name == "second":
        os._exit(1)
    return item.name
