"""What the launchers share: one commit shipped everywhere, commands shown before they run, errors of one line.

Everything after `--` goes to mesanet_jax.train, and is checked here before anything is rented or started.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from mesanet_jax.training.arguments import parse as parse_training

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Exit statuses of mesanet_jax.train that starting again does not change: done, diverged, a mistake in the command.
FINAL = (0, 1, 2)


def parser(doc: str) -> argparse.ArgumentParser:
    """The flags that every launcher has."""
    flags = cli.parser(doc)
    flags.add_argument("--dry-run", action="store_true", help="print what would be run, and run nothing")
    flags.add_argument(
        "--restarts", type=int, default=20, help="how often to start again after a preemption or a crash"
    )
    return flags


def parse(flags: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The launcher's flags, and the arguments after `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    args, overrides = cli.parse(flags, argv[:at])
    if overrides:
        raise UserError(f"--config.{next(iter(overrides))}: goes to the training, so it belongs after --")
    return args, argv[at + 1 :]


def check_training(arguments: list[str]) -> None:
    """Raises UserError for what mesanet_jax.train would refuse before it touches data or a device."""
    args, _ = parse_training(arguments)
    if args.coordinator is not None:
        raise UserError("--coordinator: is set by the launcher")


def commit(*, dirty: bool) -> str:
    """The commit to ship. Uncommitted changes are refused, or left behind where `dirty` says so."""
    changed = ask("git", "-C", str(ROOT), "status", "--porcelain").splitlines()
    if changed and not dirty:
        raise UserError(
            f"{len(changed)} uncommitted changes ({changed[0].strip()}, ...) would not be shipped; commit them, or add"
            " --dirty to ship the last commit without them"
        )
    return ask("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()


def add_dirty_flag(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("--dirty", action="store_true", help="ship the last commit although the tree has changes")


def run(*command: str, dry_run: bool, text: str | None = None) -> None:
    """Shows a command, and runs it unless `dry_run`; `text` is its standard input.

    Raises:
      UserError: if it fails or is not installed.
    """
    print(f"+ {shlex.join(command)}", flush=True)
    if not dry_run:
        _completed(command, text=text, capture=False)


def ask(*command: str) -> str:
    """The output of a command that changes nothing, so that a dry run needs it too."""
    return _completed(command, text=None, capture=True)


def _completed(command: tuple[str, ...], *, text: str | None, capture: bool) -> str:
    output = subprocess.PIPE if capture else None
    try:
        done = subprocess.run(command, input=text, stdout=output, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: is not installed, or not on the PATH") from None
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{shlex.join(command)[:200]}: status {done.returncode}: {said[-1]}")
    sys.stderr.write(done.stderr)
    return done.stdout or ""
