"""Trains several configs that differ in the architecture alone and compares them: `python -m mesanet_jax.compare
--configs=configs/mesanet.py:demo,configs/transformer.py:demo --workdir=DIR --steps=100`

One after another, each by the real trainer and evaluator in DIR/NAME, on the same rows in the same order; then one report,
DIR/comparison.{md,json} and its plots. `--config.FIELD=VALUE` holds for every run, an option of a mixer or kind of model
for those that have it. Running the same command again goes on where it stopped and repeats nothing that is finished.
Exit status: 0 all compared, 1 some run failed (the others are compared), 2 a mistake in the command or runs that cannot be
compared, 128 + signal after SIGTERM or Ctrl-C (everything saved).
"""

import dataclasses
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import jax
from etils import epath

from mesanet_jax import cli, schema
from mesanet_jax import config as config_lib
from mesanet_jax.errors import UserError
from mesanet_jax.mixers import MIXERS
from mesanet_jax.models import MODELS, LanguageModel
from mesanet_jax.reporting import comparison
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.schema import Config
from mesanet_jax.training import checkpoint
from mesanet_jax.training.data import open_data

# What may differ between the runs of a comparison, beside the options of mixers and of kinds of model. The feed-forward
# may, since a larger mixer is made up for by a narrower one (`configs/mamba2.py:440m-published`). The report states it all.
FREE = {
    "name", "model.kind", "model.pattern", "model.mlp_ratio", "optimizer.learning_rate", "optimizer.muon.learning_rate"
}  # fmt: skip
# Fields of some mixer, and of some kind of model alone.
OPTIONS = {
    f"model.{path}"
    for path in schema.flatten({name: mixer.FIELDS for name, mixer in MIXERS.items()})
    | {name: None for kind in MODELS.values() for name in kind.FIELDS.keys() - LanguageModel.FIELDS.keys()}
}


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--configs", required=True, help="what to compare, as configs/mesanet.py:demo,configs/gla.py:demo"
    )
    flags.add_argument("--workdir", required=True, type=workdir_lib.path, help="where the runs and the report live")
    flags.add_argument("--steps", help="updates of every run; default: those of the configs")
    args, overrides = cli.parse(flags, argv)
    if args.steps is not None and overrides.setdefault("steps", args.steps) != args.steps:
        raise UserError(f"--steps={args.steps}: but --config.steps={overrides['steps']}; give one of them")
    jax.config.update("jax_platforms", "cpu")  # of this process alone: the accelerators belong to the runs it starts
    runs = load(args.configs.split(","), overrides, args.workdir)

    finished: list[Run] = []
    failed: dict[str, str] = {}
    with Relay() as relay:
        for number, run in enumerate(runs, start=1):
            print(f"[{number}/{len(runs)}] {run.config.name}: {run.spec} in {run.workdir}", flush=True)
            for path in overrides.keys() - run.overrides.keys():
                print(f"--config.{path}: not an option of {run.config.name}, left out", flush=True)
            failure = run.complete(relay)
            if relay.received:
                print("stopped by a signal; run the same command to go on", flush=True)
                return 128 + relay.received
            if failure:
                print(f"{run.config.name}: {failure}; the others go on", file=sys.stderr, flush=True)
                failed[run.config.name] = failure
            else:
                finished.append(run)
    if not finished:
        print("nothing to compare: every run failed", file=sys.stderr)
        return 1
    report = comparison.Comparison([comparison.read(run.config, run.workdir) for run in finished], failed=failed)
    report.write(args.workdir)
    print(f"{report.markdown()}\nwritten to {args.workdir}/comparison.{{md,json}}")
    return 1 if failed else 0


@dataclasses.dataclass(frozen=True)
class Run:
    """One config of the comparison, what is set on it, and its directory."""

    spec: str
    config: Config
    workdir: epath.Path
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def saved_steps(self) -> list[int]:
        """Steps whose checkpoints are there; makes no directory."""
        if not (self.workdir / checkpoint.DIRECTORY).is_dir():
            return []
        saved = checkpoint.Checkpoints(self.workdir)
        steps = saved.steps()
        saved.close()
        return steps

    def complete(self, relay: "Relay") -> str | None:
        """Does what is left of training and evaluation: what failed, or None. Each command writes its plot last."""
        values = cli.override_flags(self.overrides)
        trained = self.saved_steps()[-1:] == [self.config.steps] and (self.workdir / "loss.png").exists()
        evaluated = comparison.evaluation_path(self.config, self.workdir, ".png").exists()
        commands = {
            "train": None if trained else [f"--config={self.spec}", *values],
            "evaluate": None if trained and evaluated else [],
        }
        for name, arguments in commands.items():
            if arguments is None:
                print(f"{name}: finished before", flush=True)
                continue
            command = [sys.executable, "-m", f"mesanet_jax.{name}", f"--workdir={self.workdir}", *arguments]
            if status := relay.run(command):
                return f"mesanet_jax.{name} ended with exit status {status}"
        return None


def load(specs: Sequence[str], overrides: dict[str, str], workdir: epath.Path) -> list[Run]:
    """The runs to compare, all checked before the first is trained.

    Raises:
      UserError: a config that is wrong by itself, beside another, for the data, or for what the workdir already holds.
    """
    runs = []
    for spec in specs:
        try:
            mine = applicable(spec, overrides)
            config = config_lib.load(spec, mine)
        except UserError as error:
            raise UserError(f"{spec}: {error}") from error
        runs.append(Run(spec, config, workdir / config.name, mine))
    check_names(runs)
    check_equal(runs)
    open_data(runs[0].config)
    for run in runs:
        workdir_lib.check(run.workdir, run.config, begun=bool(run.saved_steps()))
    return runs


def applicable(spec: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """The overrides without options of mixers and kinds of model that this config's has not, but another's may have."""
    # The pattern decides what options there are.
    decisive = {path: value for path, value in overrides.items() if path == "model.pattern"}
    known = schema.flatten(config_lib.load(spec, decisive))
    return {path: value for path, value in overrides.items() if path in known or path not in OPTIONS}


def check_names(runs: Sequence[Run]) -> None:
    """Raises UserError unless every run has a directory of its own inside the workdir."""
    owners: dict[str, str] = {}
    for run in runs:
        name = run.config.name
        if name in ("", "..") or pathlib.PurePath(name).name != name:
            raise UserError(
                f"{run.spec}: config.name={name!r} names the run's directory, so it must be a plain file name"
            )
        if name in owners:
            raise UserError(
                f"config.name={name}: of both {owners[name]} and {run.spec}; give each run a name of its own"
            )
        owners[name] = run.spec


def check_equal(runs: Sequence[Run]) -> None:
    """Raises UserError where two configs differ in more than `FREE` and the options of mixers and kinds of model."""
    first, *others = runs
    reference = _compared(first.config)
    for run in others:
        values = _compared(run.config)
        differing = [path for path in sorted(reference | values) if reference.get(path) != values.get(path)]
        if differing:
            lines = "; ".join(f"config.{path}: {reference.get(path)} and {values.get(path)}" for path in differing)
            raise UserError(
                f"{first.spec} and {run.spec} differ in more than the architecture: {lines}; --config.FIELD=VALUE sets all runs"
            )


def _compared(config: Config) -> dict:
    """The values that must be equal in every run of a comparison."""
    return {path: value for path, value in schema.flatten(config).items() if path not in FREE | OPTIONS}


class Relay:
    """Runs commands one after another and passes signals on to the one that runs.

    Each has a session of its own: a terminal's Ctrl-C, which goes to a whole group, would reach it twice, and the
    trainer leaves at once on a second signal.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self):
        self.received: int | None = None
        self._process: subprocess.Popen | None = None

    def __enter__(self):
        self._previous = {number: signal.signal(number, self._pass_on) for number in self.SIGNALS}
        return self

    def __exit__(self, *_):
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str]) -> int:
        """The exit status of `command`, not started if a signal has come; its output is that of this process."""
        if self.received:
            return 128 + self.received
        self._process = subprocess.Popen(command, start_new_session=True)
        if self.received:  # while it started
            self._process.send_signal(self.received)
        status = self._process.wait()
        self._process = None
        return status

    def _pass_on(self, number: int, _) -> None:
        self.received = number
        if self._process is not None:
            self._process.send_signal(number)


if __name__ == "__main__":
    cli.run(main)
