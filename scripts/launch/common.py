"""What the launchers share: one commit for all hosts, commands that are shown before they run, and one-line errors.

Everything after `--` goes to mesanet_jax.train. It is checked here before anything is rented or started.
"""

import argparse
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Sequence

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from mesanet_jax.training import arguments

ROOT = pathlib.Path(__file__).resolve().parents[2]
# The exit statuses of mesanet_jax.train after which a restart would not help: finished, diverged, wrong command.
FINAL_STATUSES = (0, 1, 2)


def launcher_flags(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser with the flags that every launcher has; `doc` is the text of --help."""
    flags = cli.parser(doc)
    flags.add_argument("--dry-run", action="store_true", help="print the commands without running them")
    flags.add_argument(
        "--restarts", type=int, default=20, help="how often to start again after a preemption or a crash (default: 20)"
    )
    return flags


def add_dirty_flag(flags: argparse.ArgumentParser) -> None:
    """Adds --dirty, for launchers that ship a commit."""
    flags.add_argument(
        "--dirty", action="store_true", help="ship the last commit even if there are uncommitted changes"
    )


def parse_launcher(flags: argparse.ArgumentParser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Returns the launcher's flags, and the arguments of the training after `--`."""
    at = list(argv).index("--") if "--" in argv else len(argv)
    args, overrides = cli.parse(flags, list(argv[:at]))
    if overrides:
        raise UserError(f"--config.{next(iter(overrides))}: is an argument of the training, so it belongs after --")
    if args.restarts < 0:
        raise UserError(f"--restarts={args.restarts}: must be at least 0")
    return args, list(argv[at + 1 :])


def check_training_arguments(training: list[str]) -> None:
    """Raises UserError for arguments that mesanet_jax.train would refuse before it opens data or a device."""
    args, _ = arguments.parse(training)
    if args.coordinator is not None:
        raise UserError("--coordinator: is set by the launcher; leave it out")


def commit_to_ship(*, dirty: bool) -> str:
    """Returns the last commit.

    Raises:
      UserError: there are uncommitted changes, which would not be shipped, and `dirty` does not allow them.
    """
    changed = output_of("git", "-C", str(ROOT), "status", "--porcelain").splitlines()
    if changed and not dirty:
        raise UserError(
            f"{len(changed)} uncommitted changes ({changed[0].strip()}, ...) would not be shipped; commit them, or add"
            " --dirty to ship the last commit without them"
        )
    return output_of("git", "-C", str(ROOT), "rev-parse", "HEAD").strip()


def run_command(*command: str, dry_run: bool, text: str | None = None) -> None:
    """Prints a command, and runs it unless `dry_run`; `text` is its standard input.

    Raises:
      UserError: the command fails or is not installed.
    """
    print(f"+ {shlex.join(command)}", flush=True)
    if not dry_run:
        _complete(command, text=text, capture=False)


def output_of(*command: str) -> str:
    """Returns the output of a command that changes nothing, which therefore runs in a dry run too."""
    return _complete(command, text=None, capture=True)


def _complete(command: tuple[str, ...], *, text: str | None, capture: bool) -> str:
    output = subprocess.PIPE if capture else None
    try:
        done = subprocess.run(command, input=text, stdout=output, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise UserError(f"{command[0]}: is not installed, or not on the PATH") from None
    if done.returncode:
        message = done.stderr.strip().splitlines() or ["no message"]
        raise UserError(f"{shlex.join(command)[:200]}: status {done.returncode}: {message[-1]}")
    sys.stderr.write(done.stderr)
    return done.stdout or ""
