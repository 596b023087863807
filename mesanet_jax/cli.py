"""What all entry points share: flags, `--config.field=value` overrides, one-line errors with exit status 2."""

import argparse
import difflib
import sys
from collections.abc import Callable, Mapping

from mesanet_jax import schema as schema_lib
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line, no usage text in front of it."""

    def error(self, message: str):
        raise UserError(message)


def parser(doc: str | None) -> argparse.ArgumentParser:
    return _Parser(description=doc, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)


def override_flags(overrides: Mapping[str, str]) -> list[str]:
    """The words that `parse` makes `overrides` of, for a command's child."""
    return [f"--config.{path}={value}" for path, value in overrides.items()]


def parse(flags: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """The declared flags, and the `--config.a.b=value` overrides as {'a.b': 'value'}; anything else is an error."""
    required = [action for action in flags._actions if action.required]
    for action in required:  # checked last: a missing flag is often one that was misspelt, which says more
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
                raise UserError(f"{name}: needs a value, as in {name}=VALUE")
            value = rest.pop(0)
        path = name.removeprefix("--config.")
        if overrides.setdefault(path, value) != value:
            raise UserError(f"{name}: given twice, as {overrides[path]} and {value}")
    for action in required:
        if getattr(args, action.dest) is None:
            raise UserError(f"{action.option_strings[0]}: is missing ({action.help})")
    return args, overrides


def apply_overrides(config: Config, fields: schema_lib.Schema, overrides: dict[str, str]) -> None:
    """Sets each override, parsed by its field's type, in place."""
    flat = schema_lib.flatten(fields)
    for path, text in overrides.items():
        if path not in flat:
            raise schema_lib.unknown_key(path, flat, prefix="--config.")
        value = schema_lib.parse(flat[path], text, path=path)
        config.update_from_flattened_dict({path: value})


def run(main: Callable[[list[str]], int | None]) -> None:
    """Calls `main(argv)`; a user's mistake becomes one line on stderr and exit status 2."""
    try:
        status = main(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    except BrokenPipeError:  # the reader of a pipe went away, as in `... | head`
        sys.stderr.close()
        status = 0
    sys.exit(status or 0)
