"""Configs with declared fields: every field has a default, a type and a description, and no other field is accepted.

A schema is a nested dict of `Field`s. `build` makes a locked `ml_collections.ConfigDict` of it, so that a config file
cannot add fields; `parse` and `check` validate values with errors of one line. This module knows no model and no jax.
"""

import ast
import dataclasses
import difflib
import importlib.util
import json
import math
import pathlib
import re
import sys
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import ml_collections
from ml_collections import config_dict

from mesanet_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Field:
    """The declaration of a config field.

    Attributes:
      default: the value unless a config file or an override sets another.
      doc: what the field means and its unit, without a period at the end.
      kind: for a field that may be None, the type of its other values.
      choices: the allowed values; empty: all.
      at_least: an inclusive lower bound.
      above, below: exclusive bounds.
      fixed: whether a run that is resumed may not change the field.
    """

    default: Any
    doc: str
    kind: type | None = None
    choices: tuple = ()
    at_least: float | None = None
    above: float | None = None
    below: float | None = None
    fixed: bool = False

    @property
    def type(self) -> type:
        """The type of the field's values, None aside."""
        return self.kind or type(self.default)

    @property
    def optional(self) -> bool:
        """Whether the value may be None."""
        return self.kind is not None


Schema = Mapping[str, "Field | Schema"]

if TYPE_CHECKING:
    from etils import epath

    # The fields of a config are declared by a `Schema` at run time, so a type checker cannot know them.
    Config = Any
else:
    Config = ml_collections.ConfigDict

_WIDTH = 100  # columns of help texts


def flatten(tree: Mapping | ml_collections.ConfigDict, prefix: str = "") -> dict[str, Any]:
    """Flattens a schema, a config or a nested dict: {'a': {'b': 1}} -> {'a.b': 1}."""
    flat = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, (Mapping, ml_collections.ConfigDict)):
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat


def build(schema: Schema) -> Config:
    """Returns the locked config with the defaults of a schema."""

    def values(node: Schema) -> dict:
        return {key: _initial(item) if isinstance(item, Field) else values(item) for key, item in node.items()}

    return ml_collections.ConfigDict(values(schema)).lock()


def _initial(field: Field) -> Any:
    if not field.optional:
        return field.default
    reference = config_dict.placeholder(field.type)
    if field.default is not None:
        reference.set(field.default)
    return reference


def unknown_key(path: str, known: Mapping[str, Any], *, prefix: str) -> UserError:
    """Returns the error for an unknown field, with the most similar field as a suggestion."""
    leaf = path.rsplit(".", 1)[-1]
    near = difflib.get_close_matches(path, known, n=1, cutoff=0.6)
    near = near or [key for key in known if key.rsplit(".", 1)[-1] == leaf][:1]
    near = near or difflib.get_close_matches(leaf, [key.rsplit(".", 1)[-1] for key in known], n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"fields: {', '.join(sorted(known)[:12])}, ..."
    return UserError(f"{prefix}{path}: no such field; {hint}")


def parse(field: Field, text: str, *, path: str) -> Any:
    """Parses the text of an override by the type of its field.

    Raises:
      UserError: the text is not a value of this type.
    """
    if field.optional and text.lower() in ("none", "null", ""):
        return None
    try:
        return _PARSERS[field.type](text)
    except ValueError:
        wanted = {int: "a whole number", float: "a finite number", bool: "true or false", tuple: "a list like a,b"}
        raise UserError(f"--config.{path}={text}: needs {wanted[field.type]}") from None


def _parse_int(text: str) -> int:
    number = _parse_float(text) if "e" in text.lower() else int(text)
    if number != int(number):
        raise ValueError(text)
    return int(number)


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _parse_bool(text: str) -> bool:
    if text.lower() not in _BOOLEANS:
        raise ValueError(text)
    return _BOOLEANS[text.lower()]


def _parse_tuple(text: str) -> tuple:
    inner = text.strip().strip("()[]").rstrip(",")
    return tuple(_literal(item.strip()) for item in inner.split(",")) if inner else ()


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


_BOOLEANS = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_PARSERS = {int: _parse_int, float: _parse_float, bool: _parse_bool, str: str, tuple: _parse_tuple}


def check(config: Config, schema: Schema, *, prefix: str = "config.") -> None:
    """Raises UserError unless the config has exactly the fields of the schema, with values that they allow."""
    fields, values = flatten(schema), flatten(config)
    for path, value in values.items():
        if path not in fields:
            raise unknown_key(path, fields, prefix=prefix)
        field = fields[path]
        if value is None and field.optional:
            continue
        if not _has_type(value, field.type):
            raise UserError(f"{prefix}{path}={value!r}: needs {field.type.__name__}")
        if field.choices and value not in field.choices:
            raise UserError(f"{prefix}{path}={value}: choose one of {', '.join(map(str, field.choices))}")
        if field.at_least is not None and value < field.at_least:
            raise UserError(f"{prefix}{path}={value}: must be at least {field.at_least}")
        if field.above is not None and value <= field.above:
            raise UserError(f"{prefix}{path}={value}: must be above {field.above}")
        if field.below is not None and value >= field.below:
            raise UserError(f"{prefix}{path}={value}: must be below {field.below}")
    missing = sorted(set(fields) - set(values))
    if missing:
        raise UserError(f"{prefix}{missing[0]}: missing from this config")


def _has_type(value: Any, kind: type) -> bool:
    """Whether a value has a type; an int is also a float, but True is not an int, and NaN is not a float."""
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is kind


def load_file(spec: str) -> Config:
    """Returns the config of `--config=SPEC`, which its file's `get_config` makes.

    While a file outside the shipped configs is loaded, it can import the other files of its folder by the folder's
    name, as in `from my_configs.shared import learning_rate`.

    Args:
      spec: a file or the name of a shipped config, and optionally an argument for `get_config`: "configs/mesanet.py",
        "configs/mesanet.py:140m" or "mesanet:140m". A file is looked up in the current directory first, then among the
        shipped configs.

    Raises:
      UserError: there is no such config, or its file raised an exception.
    """
    name, _, argument = spec.partition(":")
    path = _find_config(name, spec=spec)
    module_spec = importlib.util.spec_from_file_location(f"config_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise UserError(f"--config={spec}: {name} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    neighbours = [] if path.parent == _shipped_configs() else [str(path.resolve().parent.parent)]
    sys.path[:0] = neighbours
    try:
        module_spec.loader.exec_module(module)
        return module.get_config(argument) if argument else module.get_config()
    except UserError:
        raise
    except Exception as error:  # the file is the user's, and so is whatever it raises
        raise UserError(f"--config={spec}: {type(error).__name__}: {_one_line(error)}") from error
    finally:
        for folder in neighbours:
            sys.path.remove(folder)


def _find_config(name: str, *, spec: str) -> pathlib.Path:
    """Returns the file of a config, given its path or the name of a family.

    Raises:
      UserError: there is none; the message has the nearest name.
    """
    path, shipped = pathlib.Path(name), _shipped_configs()
    is_family = path.name == name and not path.suffix
    if is_family:
        candidates = [path, pathlib.Path("configs", f"{name}.py"), shipped / f"{name}.py"]
    elif path.parent == pathlib.Path("configs"):
        candidates = [path, shipped / path.name]
    else:
        candidates = [path]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is not None:
        return found
    families = sorted(file.stem for file in shipped.glob("*.py"))
    known = [str(file) for file in path.parent.glob("*.py")] + [f"configs/{family}.py" for family in families]
    near = difflib.get_close_matches(str(path), families if is_family else known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"shipped configs: {', '.join(families)}"
    missing = f"no file {name} and no shipped config of that name" if is_family else f"no file {name}"
    raise UserError(f"--config={spec}: {missing}; {hint}")


def _shipped_configs() -> pathlib.Path:
    """Returns the folder of the shipped configs: beside this file in a wheel, at the top of a checkout."""
    installed = pathlib.Path(__file__).parent / "configs"
    return installed if installed.is_dir() else pathlib.Path(__file__).parents[1] / "configs"


def _one_line(error: Exception) -> str:
    """Its text, without the list of all fields that ml_collections puts before its suggestion."""
    text = " ".join(str(error).replace(r"\n", " ").split())  # a KeyError's text is its repr
    text = re.sub(r"""^(['"])(.*)\1$""", r"\2", text)
    return re.sub(r' Other fields present: ".*}"', "", text)


def to_json(config: Config) -> str:
    """Returns a config as JSON text, for `read_json`."""
    return json.dumps(config.to_dict(), indent=2) + "\n"


def read_json(path: "epath.Path | pathlib.Path") -> dict[str, Any]:
    """Reads a saved config as {path: value}; lists become tuples again."""
    flat = flatten(json.loads(path.read_text()))
    return {key: tuple(value) if isinstance(value, list) else value for key, value in flat.items()}


def describe(schema: Schema) -> str:
    """Returns the help text of a schema for --help-config: each field with its default, its description and choices."""
    lines = ["The fields of a config and their defaults; a config file may set other values."]
    fields = flatten(schema)
    if any(field.fixed for field in fields.values()):
        lines.append("A run that is resumed must keep the values of fields that are marked (fixed).")
    for path, field in fields.items():
        lines += ["", f"--config.{path}={_as_text(field.default)}"]
        lines += textwrap.wrap(_description(field), _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines)


def _as_text(value: Any) -> str:
    """A value in the form that `parse` reads."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _description(field: Field) -> str:
    """The description of a field, its choices, and whether a resumed run may change it."""
    choices = f" [{', '.join(map(str, field.choices))}]" if field.choices else ""
    return f"{field.doc}{choices}{' (fixed)' if field.fixed else ''}"
