"""Command lines: flags, `--config.FIELD=VALUE` overrides, and errors of one line with exit status 2."""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn

from mesanet_jax import schema as schema_lib
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises UserError instead of printing its usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command whose --help prints `doc`."""
    return _Parser(description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)


def override_flags(overrides: Mapping[str, str]) -> list[str]:
    """Returns the arguments that `parse` turns into `overrides`, to pass them on to another command."""
    return [f"--config.{path}={value}" for path, value in overrides.items()]


def parse(flags: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Returns the values of the flags, and the `--config.a.b=value` overrides as {'a.b': 'value'}.

    Raises:
      UserError: an unknown or missing flag, or an override that is given twice with different values.
    """
    required = [action for action in flags._actions if action.required]
    for action in required:  # checked last, because a missing flag is often a misspelt one, which makes a better error
        action.required = False
    args, rest = flags.parse_known_args(argv)
    overrides: dict[str, str] = {}
    rest = list(rest)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if not name.startswith("--config."):
            known = [option for action in flags._actions for option in action.option_strings] + ["--config.FIELD"]
            near = difflib.get_close_matches(name.split(".")[0], known, n=1, cutoff=0.5)
            raise UserError(f"{word}: unknown flag" + (f"; did you mean {near[0]}?" if near else ""))
        if not equals:
            if not rest:
                raise UserError(f"{name}: needs a value; write {name}=VALUE")
            value = rest.pop(0)
        path = name.removeprefix("--config.")
        if overrides.setdefault(path, value) != value:
            raise UserError(f"{name}: given twice, as {overrides[path]} and as {value}")
    for action in required:
        if getattr(args, action.dest) is None:
            raise UserError(f"{action.option_strings[0]}: is missing ({action.help})")
    return args, overrides


def apply_overrides(config: Config, fields: schema_lib.Schema, overrides: dict[str, str]) -> None:
    """Sets the overrides in `config`, each parsed by the type of its field.

    Raises:
      UserError: an unknown field, or a text that does not parse.
    """
    flat = schema_lib.flatten(fields)
    for path, text in overrides.items():
        if path not in flat:
            raise schema_lib.unknown_key(path, flat, prefix="--config.")
        value = schema_lib.parse(flat[path], text, path=path)
        config.update_from_flattened_dict({path: value})


def run(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Calls `main(argv)` and exits with its status; a UserError becomes one line on stderr and status 2."""
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # the reader of a pipe has closed it, as in `... | head`
        sys.stderr.close()
        status = 0
    sys.exit(status or 0)
