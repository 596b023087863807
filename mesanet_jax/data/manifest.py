"""Builds and reads the manifest of a prepared directory: what its rows are, their origin and their fingerprint."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from mesanet_jax.data.files import Directory
from mesanet_jax.data.hashing import sha256_of_json
from mesanet_jax.data.problems import Problems
from mesanet_jax.data.tokenizer import Tokenizer
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

VERSION = 1
NAME = "manifest.json"
COUNTS = ("documents", "text_bytes", "words", "tokens", "rows")  # per split; `words` are separated by white space


def build(
    records: Sequence[dict[str, Any]], *, config: Config, settings: dict[str, Any], tokens: Tokenizer
) -> dict[str, Any]:
    """Builds the manifest from the records of the finished units.

    Args:
      records: in the order of the units.
      settings: the settings and inputs that determine the rows.

    Raises:
      UserError: a split has no documents.
    """
    problems = Problems(on_error="skip", max_errors=sys.maxsize)
    splits: dict[str, dict[str, Any]] = {}
    for record in records:
        problems.merge(record["problems"])
        for split, counts in record["splits"].items():
            total = splits.setdefault(split, {"shards": [], **dict.fromkeys(COUNTS, 0)})
            total["shards"].append(counts["shard"])
            for key in COUNTS:
                total[key] += counts[key]
    for split, total in splits.items():
        total["padding_tokens"] = total["rows"] * (config.seq_len + 1) - total["tokens"]
        if not total["documents"]:
            held_out = f"config.holdout={config.holdout} of the input is less than one document"
            reason = str(problems) if problems.places else held_out
            raise UserError(f"{config.output}: there are no documents for the {split} split: {reason}")
    special = {name: getattr(tokens, name) for name in ("bos_id", "eos_id", "pad_id")}
    described = {
        "version": VERSION,
        "seq_len": config.seq_len,
        "vocab_size": tokens.vocab_size,
        "bos": config.bos,
        "eos": config.eos,
        "tokenizer": {"kind": config.tokenizer.kind, "hash": tokens.hash, **special},
        "splits": splits,
        "problems": problems.record(),
        "settings": settings,
    }
    return described | {"fingerprint": fingerprint(described)}


def fingerprint(manifest: dict[str, Any]) -> str:
    """Returns the SHA-256 hash of what determines the rows and their meaning, without their origin and location."""
    shards = {
        split: [[shard["rows"], shard["sha256"]] for shard in record["shards"]]
        for split, record in manifest["splits"].items()
    }
    meaning = [manifest[key] for key in ("version", "seq_len", "vocab_size", "bos", "eos")]
    return sha256_of_json([meaning, manifest["tokenizer"]["hash"], shards])


def encode(value: Any) -> bytes:
    """Returns the content of a JSON file."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def read(directory: Directory) -> dict[str, Any]:
    """Reads the manifest of a finished preparation.

    Raises:
      UserError: the manifest is missing, broken or of another version.
    """
    where = f"{directory.path}/{NAME}"
    content = directory.read(NAME)
    if content is None:
        raise UserError(
            f"{where}: missing; run `python -m mesanet_jax.prepare`, which also resumes an interrupted preparation"
        )
    try:
        manifest = json.loads(content)
        version = manifest["version"]
        intact = version != VERSION or fingerprint(manifest) == manifest["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{where}: not a manifest ({reason}); delete it and prepare the data again") from error
    if version != VERSION:
        raise UserError(
            f"{where}: has version {version}, but this program reads version {VERSION}; prepare the data again"
        )
    if not intact:
        raise UserError(f"{where}: its fingerprint does not match its content; delete it and prepare the data again")
    return manifest
