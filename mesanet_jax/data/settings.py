"""Checks a preparation's config, finds its input files, and ties the output directory to the settings of its rows."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mesanet_jax import schema
from mesanet_jax.data import files, manifest, pack_unit, tokenizer
from mesanet_jax.data.files import Directory, Source
from mesanet_jax.data.schema import SCHEMA
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

NAME = "settings.json"
_INPUTS = {"train": "input", "validation": "validation_input", "test": "test_input"}
# These fields do not affect the rows, so they may change when a preparation is resumed. The inputs are compared by
# their file lists instead.
_FREE = ("output", "workers", "on_error", "max_errors", *_INPUTS.values())


def check(config: Config) -> None:
    """Checks each field and their combination.

    Raises:
      UserError: a value is invalid, or two fields contradict each other.
    """
    schema.check(config, SCHEMA)
    kind, path = config.tokenizer.kind, config.tokenizer.path
    joined = config.document == "join"
    one_document = "cannot be combined with config.document=join, which leaves a single document"
    wrong = {
        "output: is empty; name the directory to write, as --config.output=DIR": not config.output,
        "input: is empty; name the files to prepare": not any(config[field] for field in _INPUTS.values()),
        f"holdout={config.holdout}: must be below 1": config.holdout >= 1,
        "holdout: cannot be combined with config.validation_input; set only one of them": (
            config.holdout > 0 and config.validation_input != ""
        ),
        f"holdout: {one_document}": config.holdout > 0 and joined,
        f"limit_documents: {one_document}": config.limit_documents > 0 and joined,
        "tokenizer.path: is empty; name the tokenizer.json of the huggingface tokenizer": (
            kind == "huggingface" and not path
        ),
        "tokenizer.path: must be empty, because a bytes tokenizer has no file": kind == "bytes" and path != "",
        "tokenizer.path: is empty, and without config.input there is no text to train a tokenizer on": (
            kind == "sentencepiece" and not path and not config.input
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise UserError(f"config.{message}")


def sources(config: Config) -> dict[str, Sequence[Source]]:
    """Returns the input files of each split that has any.

    Raises:
      UserError: a file cannot be found, or belongs to two splits, which would leak its text from one into the other.
    """
    found: dict[str, Sequence[Source]] = {
        split: files.expand(config[field], field=f"config.{field}") for split, field in _INPUTS.items() if config[field]
    }
    for one, other in itertools.combinations(found, 2):
        shared = sorted({source.name for source in found[one]} & {source.name for source in found[other]})
        if shared:
            raise UserError(
                f"{shared[0]}: is an input of both the {one} and the {other} split; remove it from one of them"
            )
    return found


def settings(config: Config, inputs: Mapping[str, Sequence[Source]]) -> dict[str, Any]:
    """Returns all that the rows depend on, as a flat dict that JSON can hold: {path of a field: value}.

    Raises:
      UserError: the tokenizer's file cannot be read.
    """
    chosen = {path: value for path, value in schema.flatten(config).items() if path not in _FREE}
    if config.tokenizer.path:
        content = files.read(config.tokenizer.path, field="config.tokenizer.path")
        chosen["tokenizer.path"] = f"sha256 {hashlib.sha256(content).hexdigest()}"
    for split, of_split in inputs.items():
        chosen[f"sources.{split}"] = [[source.name, source.size] for source in of_split]
    return chosen


def claim(directory: Directory, chosen: dict[str, Any]) -> None:
    """Writes the settings into a directory, which ties the directory to them.

    Raises:
      UserError: the directory has units that were finished with other settings.
    """
    content = directory.read(NAME)
    before = json.loads(content) if content else {}
    if before == chosen:
        return
    if not any(map(pack_unit.is_record, directory.sizes())):
        for kind in tokenizer.KINDS.values():
            if kind.file:
                directory.remove(kind.file)  # it may depend on the other settings
        directory.write(NAME, manifest.encode(chosen))
        return
    for path in sorted(before.keys() | chosen.keys()):
        old, new = before.get(path), chosen.get(path)
        if old != new:
            old, new = _file_lists(old, new) if path.startswith("sources.") else (old, new)
            advice = "choose another config.output or delete it"
            raise UserError(f"{directory.path}: was prepared with {path}={old}, but now it is {new}; {advice}")


def _file_lists(old: list | None, new: list | None) -> tuple[str, str]:
    """Describes two different lists of files by their lengths and the first files that differ."""
    pairs = itertools.zip_longest(old or [], new or [])
    first = next(pair for pair in pairs if pair[0] != pair[1])
    shown = [f"{item[0]} of {item[1]} bytes" if item else "nothing" for item in first]
    return f"{len(old or [])} files ({shown[0]})", f"{len(new or [])} files ({shown[1]})"
