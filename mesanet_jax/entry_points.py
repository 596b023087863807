"""The installed scripts: `mesanet-train` runs `python -m mesanet_jax.train`, and so on (pyproject.toml names them)."""

import importlib
from collections.abc import Callable

from mesanet_jax import cli


def _command(name: str) -> Callable[[], None]:
    """Return a function without arguments that runs the command of this name and exits with its status."""

    def run() -> None:
        cli.run(importlib.import_module(f"mesanet_jax.{name}").main)

    return run


prepare = _command("prepare")
recall = _command("recall")
train = _command("train")
evaluate = _command("evaluate")
compare = _command("compare")
generate = _command("generate")
compile = _command("compile")
