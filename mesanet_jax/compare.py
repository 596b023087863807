"""Trains several configs that differ only in the architecture, and compares them:

    python -m mesanet_jax.compare --configs=configs/mesanet.py:demo,configs/transformer.py:demo --workdir=DIR

Runs the trainer and the evaluator for one config after another, in DIR/NAME, on the same rows in the same order. Then
writes one report, DIR/comparison.{md,json}, with its plots. docs/comparing.md explains how to read it.

--config.FIELD=VALUE sets a field of every run, or an option of a mixer or kind of model in every run that has it.
Running the same command again continues where it stopped and repeats nothing that is finished.

Exit status: 0 if all were compared; 1 if a run failed (the others are compared); 2 for a mistake in the command or
for runs that cannot be compared; 128 + signal after SIGTERM or Ctrl-C (everything is saved).
"""

import sys

import jax

from mesanet_jax import cli
from mesanet_jax.comparing import runs as runs_lib
from mesanet_jax.comparing.relay import SignalRelay
from mesanet_jax.comparing.report import ComparisonReport
from mesanet_jax.comparing.results import read
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import workdir as workdir_lib


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument(
        "--configs", required=True, help="the configs to compare, such as configs/mesanet.py:demo,configs/gla.py:demo"
    )
    flags.add_argument("--workdir", required=True, type=workdir_lib.path, help="directory of the runs and the report")
    flags.add_argument("--steps", help="updates of every run (default: as the configs say)")
    args, overrides = cli.parse(flags, argv)
    if args.steps is not None and overrides.setdefault("steps", args.steps) != args.steps:
        raise UserError(f"--steps={args.steps} and --config.steps={overrides['steps']}: give one of them")
    jax.config.update("jax_platforms", "cpu")  # only for this process: the accelerators belong to the runs it starts
    runs = runs_lib.load(args.configs.split(","), overrides, args.workdir)

    finished: list[runs_lib.Run] = []
    failed: dict[str, str] = {}
    with SignalRelay() as relay:
        for number, run in enumerate(runs, start=1):
            print(f"[{number}/{len(runs)}] {run.config.name}: {run.spec} in {run.workdir}", flush=True)
            for path in overrides.keys() - run.overrides.keys():
                print(f"--config.{path}: ignored, {run.config.name} has no such option", flush=True)
            failure = run.complete(relay)
            if relay.received:
                print("stopped by a signal; run the same command to continue", flush=True)
                return 128 + relay.received
            if failure:
                print(f"{run.config.name}: {failure}; the other runs continue", file=sys.stderr, flush=True)
                failed[run.config.name] = failure
            else:
                finished.append(run)
    if not finished:
        print("nothing to compare: every run failed", file=sys.stderr)
        return 1
    report = ComparisonReport([read(run.config, run.workdir) for run in finished], failed=failed)
    report.write(args.workdir)
    print(f"{report.markdown()}\nwritten to {args.workdir}/comparison.{{md,json}}")
    return 1 if failed else 0


if __name__ == "__main__":
    cli.run(main)
