"""The runs of a comparison: which configs may be compared, and what is left to do for each of them."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from etils import epath

from mesanet_jax import cli, schema
from mesanet_jax import config as config_lib
from mesanet_jax.comparing.relay import SignalRelay
from mesanet_jax.comparing.results import evaluation_path
from mesanet_jax.errors import UserError
from mesanet_jax.mixers import MIXERS
from mesanet_jax.models import MODELS, LanguageModel
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.schema import Config
from mesanet_jax.training import checkpoint
from mesanet_jax.training.data import open_data

# The fields that may differ between the runs of a comparison, besides the options of mixers and of kinds of model. The
# width of the feed-forward may differ because a narrower one makes up for a larger mixer (as in
# `configs/mamba2.py:440m-published`). The report lists all differences.
FREE = {
    "name",
    "model.kind",
    "model.pattern",
    "model.mlp_ratio",
    "optimizer.learning_rate",
    "optimizer.muon.learning_rate",
}
# The fields that only some mixers or some kinds of model have.
OPTIONS = {
    f"model.{path}"
    for path in schema.flatten({name: mixer.FIELDS for name, mixer in MIXERS.items()})
    | {name: None for kind in MODELS.values() for name in kind.FIELDS.keys() - LanguageModel.FIELDS.keys()}
}


@dataclasses.dataclass(frozen=True)
class Run:
    """One config of the comparison, the overrides that apply to it, and its directory."""

    spec: str
    config: Config
    workdir: epath.Path
    overrides: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def saved_steps(self) -> list[int]:
        """Returns the steps of the checkpoints that exist; creates no directory."""
        if not (self.workdir / checkpoint.DIRECTORY).is_dir():
            return []
        saved = checkpoint.Checkpoints(self.workdir)
        steps = saved.steps()
        saved.close()
        return steps

    def complete(self, relay: SignalRelay) -> str | None:
        """Trains and evaluates, unless that is done; returns what failed, or None."""
        values = cli.override_flags(self.overrides)
        # Each command writes its plot last, so a plot shows that the command has finished.
        trained = self.saved_steps()[-1:] == [self.config.steps] and (self.workdir / "loss.png").exists()
        evaluated = evaluation_path(self.config, self.workdir, ".png").exists()
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
    """Returns the runs to compare, all of them checked before the first is trained.

    Raises:
      UserError: a config is invalid, differs from another in more than the architecture, does not fit the data, or
        differs from the run that its directory already holds.
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
    """Returns the overrides for this config: without the options that only other mixers or kinds of model have."""
    # The pattern decides which options there are.
    decisive = {path: value for path, value in overrides.items() if path == "model.pattern"}
    known = schema.flatten(config_lib.load(spec, decisive))
    return {path: value for path, value in overrides.items() if path in known or path not in OPTIONS}


def check_names(runs: Sequence[Run]) -> None:
    """Raises UserError unless every run has its own directory inside the workdir."""
    owners: dict[str, str] = {}
    for run in runs:
        name = run.config.name
        if name in ("", "..") or pathlib.PurePath(name).name != name:
            raise UserError(
                f"{run.spec}: config.name={name!r} names the run's directory, so it must be a plain file name"
            )
        if name in owners:
            raise UserError(
                f"config.name={name}: {owners[name]} and {run.spec} have the same name; give each run its own name"
            )
        owners[name] = run.spec


def check_equal(runs: Sequence[Run]) -> None:
    """Raises UserError if two configs differ in more than `FREE` and the options of mixers and kinds of model."""
    first, *others = runs
    reference = _compared(first.config)
    for run in others:
        values = _compared(run.config)
        differing = [path for path in sorted(reference | values) if reference.get(path) != values.get(path)]
        if differing:
            lines = "; ".join(f"config.{path}: {reference.get(path)} and {values.get(path)}" for path in differing)
            raise UserError(
                f"{first.spec} and {run.spec} differ in more than the architecture: {lines};"
                " --config.FIELD=VALUE sets a field of all runs"
            )


def _compared(config: Config) -> dict[str, Any]:
    """Returns the values that must be equal in every run of a comparison."""
    return {path: value for path, value in schema.flatten(config).items() if path not in FREE | OPTIONS}
