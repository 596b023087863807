"""What a preparation is: its inputs and the settings its rows depend on, tied to the output directory."""

import hashlib
import itertools
import json
from typing import Any

from mesanet_jax import schema
from mesanet_jax.data import files, manifest, pack_unit, tokenizer
from mesanet_jax.data.files import Directory, Source
from mesanet_jax.data.schema import SCHEMA
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

NAME = "settings.json"
_INPUTS = {"train": "input", "validation": "validation_input", "test": "test_input"}
# What may differ between the runs that finish one preparation: none of it shows in the rows.
_FREE = ("output", "workers", "on_error", "max_errors", *_INPUTS.values())


def check(config: Config) -> None:
    """Raises UserError for a field that is wrong by itself or beside another."""
    schema.check(config, SCHEMA)
    kind, path, joined = config.tokenizer.kind, config.tokenizer.path, config.document == "join"
    wrong = {
        "output: is empty; name the directory to write, as --config.output=DIR": not config.output,
        "input: is empty; name the files to prepare": not any(config[field] for field in _INPUTS.values()),
        f"holdout={config.holdout}: must be below 1": config.holdout >= 1,
        "holdout: not together with config.validation_input": config.holdout > 0 and config.validation_input != "",
        "holdout: needs single documents; document=join makes one": config.holdout > 0 and joined,
        "limit_documents: needs single documents; document=join makes one": config.limit_documents > 0 and joined,
        "tokenizer.path: is empty; a huggingface tokenizer needs its file": kind == "huggingface" and not path,
        "tokenizer.path: a bytes tokenizer has no file": kind == "bytes" and path != "",
        "tokenizer.path: is empty, and without config.input there is no text to train a tokenizer on": (
            kind == "sentencepiece" and not path and not config.input
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"config.{message}")


def sources(config: Config) -> dict[str, list[Source]]:
    """The files of each split that has any. Raises UserError for a file in two splits: it would be a leak."""
    found = {
        split: files.expand(config[field], field=f"config.{field}") for split, field in _INPUTS.items() if config[field]
    }
    for one, other in itertools.combinations(found, 2):
        shared = sorted({source.name for source in found[one]} & {source.name for source in found[other]})
        if shared:
            raise UserError(f"{shared[0]}: is in both {one} and {other}")
    return found


def settings(config: Config, inputs: dict[str, list[Source]]) -> dict[str, Any]:
    """What the rows depend on, flat, as it is stored and compared."""
    chosen = {path: value for path, value in schema.flatten(config).items() if path not in _FREE}
    if config.tokenizer.path:
        content = files.read(config.tokenizer.path, field="config.tokenizer.path")
        chosen["tokenizer.path"] = f"sha256 {hashlib.sha256(content).hexdigest()}"
    for split, of_split in inputs.items():
        chosen[f"sources.{split}"] = [[source.name, source.size] for source in of_split]
    return chosen


def claim(directory: Directory, chosen: dict[str, Any]) -> None:
    """Writes the settings into a directory. Raises UserError, with both values, where it has units done with others."""
    content = directory.read(NAME)
    before = json.loads(content) if content else {}
    if before == chosen:
        return
    if not any(map(pack_unit.is_record, directory.sizes())):
        for kind in tokenizer.KINDS.values():
            if kind.file:
                directory.remove(kind.file)  # made for the other settings
        directory.write(NAME, manifest.encode(chosen))
        return
    for path in sorted(before.keys() | chosen.keys()):
        old, new = before.get(path), chosen.get(path)
        if old != new:
            old, new = _file_lists(old, new) if path.startswith("sources.") else (old, new)
            advice = "choose another config.output or delete it"
            raise UserError(f"{directory.path}: was prepared with {path}={old}, now it is {new}; {advice}")


def _file_lists(old: list | None, new: list | None) -> tuple[str, str]:
    """Of two lists of files, the counts and the first that differs."""
    pairs = itertools.zip_longest(old or [], new or [])
    first = next(pair for pair in pairs if pair[0] != pair[1])
    shown = [f"{item[0]} of {item[1]} bytes" if item else "nothing" for item in first]
    return f"{len(old or [])} files ({shown[0]})", f"{len(new or [])} files ({shown[1]})"
