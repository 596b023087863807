"""Runs everything that docs/results/maglev.md reports, on one GPU:

    python -m scripts.results.maglev_results --data=DATA --recall=RECALL --out=DIR

DATA holds rows of text (written by mesanet_jax.prepare), RECALL rows of delayed recall whose delay is beyond the reach
of the stacked windows of --recall_size:

    python -m mesanet_jax.recall --config.output=RECALL --config.seq_len=512 --config.delay=300

First it measures the cost of a training step, alone on the GPU. Then it trains and evaluates the models on text and on
recall, --jobs at once; Maglev a second time on recall, with the small lambda of --weak. Models with a memory are
evaluated exactly, with one step per token. At last it writes a report on each task: DIR/text/comparison.md, recall and
recall-weak.

Each command is printed. Running the script again continues where it stopped; --dry-run only prints the commands.
--config.FIELD=VALUE sets a field of the runs on text, --recall_values=FIELD=VALUE,... of those on recall; an option of
a kind of model applies to the runs that have it.
"""

import argparse
import pathlib
from collections.abc import Mapping

from mesanet_jax import cli, schema
from mesanet_jax import config as config_lib
from mesanet_jax.comparing.runs import applicable
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.reporting.evaluation_report import file_stem
from scripts.results.chains import Command, carry_out, module

ROOT = pathlib.Path(__file__).parents[2]

MAGLEV = ("maglev.py:{}", "maglev.py:{}-separate")
# The last one is the Transformer that the cost of the others is compared with.
MODELS = (*MAGLEV, "lrt.py:{}", "lrt.py:{}-k2", "maglev.py:{}-interleaved", "maglev.py:{}-sliding")
# The overrides of an exact evaluation. A step takes as long for some rows as for one, so a batch has 40 rows; with more
# rows the logits would be too large.
EXACT = {"model.deployed_by": "steps", "data.batch_size": "40", "train.rows_per_device": "40"}


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--data", required=True, help="rows of text, written by mesanet_jax.prepare")
    flags.add_argument("--recall", required=True, help="rows written by mesanet_jax.recall")
    flags.add_argument("--out", required=True, type=pathlib.Path, help="directory of the runs and reports")
    flags.add_argument(
        "--cost_size", default="d12", help="size in configs/maglev.py and lrt.py whose training step is measured"
    )
    flags.add_argument("--size", default="d12", help="size of the runs on text")
    flags.add_argument("--recall_size", default="demo", help="size of the runs on recall")
    flags.add_argument("--steps", type=int, default=2000, help="updates per run on text")
    flags.add_argument("--recall_steps", type=int, default=2000, help="size of the runs on recall")
    flags.add_argument("--recall_values", default="", help="fields of the runs on recall: FIELD=VALUE,...")
    flags.add_argument("--weak", default="0.01", help="lambda of Maglev's second runs on recall")
    flags.add_argument(
        "--jobs", type=int, default=1, help="runs on the GPU at once; with more than one, their speeds mean nothing"
    )
    flags.add_argument("--dry-run", action="store_true", help="only print the commands")
    args, overrides = cli.parse(flags, argv)
    return 0 if carry_out(*commands(args, overrides), args.out, jobs=args.jobs, dry=args.dry_run) else 1


def commands(
    args: argparse.Namespace, overrides: dict[str, str]
) -> tuple[Command, dict[str, list[Command]], list[Command]]:
    """Returns the command that measures the cost, the commands of each run by its name, and those of the reports."""
    measured = f"--configs={','.join(of_size(args.cost_size, MODELS))}"
    flags = [f"--out={args.out}/cost", measured, "--kinds=training", "--lengths=2048"]
    cost = [*module("scripts.results.efficiency"), *flags]
    recall = recall_values(args)
    weak = recall | {"model.consistency_weight": args.weak}
    tasks = {
        "text": (of_size(args.size, MODELS), args.steps, overrides | {"data.path": args.data}),
        "recall": (of_size(args.recall_size, MODELS), args.recall_steps, recall),
        "recall-weak": (of_size(args.recall_size, MAGLEV), args.recall_steps, weak),
    }
    chains: dict[str, list[Command]] = {}
    reports: list[Command] = []
    for task, (specs, steps, fields) in tasks.items():
        fields = dict(fields) | {"steps": str(steps)}
        for spec in specs:
            name = spec.removeprefix("configs/").replace(".py:", "-")
            chains[f"{task}-{name}"] = run(spec, args.out / task / name, fields)
        flags = [f"--configs={','.join(specs)}", f"--workdir={args.out}/{task}"]
        reports.append([*module("mesanet_jax.compare"), *flags, *cli.override_flags(fields)])
    return cost, chains, reports


def run(spec: str, workdir: pathlib.Path, fields: Mapping[str, str]) -> list[Command]:
    """Returns the commands that train and evaluate a model, unless that is done.

    They are those of mesanet_jax.compare, except for the exact evaluation.
    """
    if (workdir / "evaluation" / f"{file_stem('validation', int(fields['steps']))}.png").exists():
        return []
    has_memory = "model.deployed_by" in schema.flatten(config_lib.load(spec, {}))
    return [
        [
            *module("mesanet_jax.train"),
            f"--config={spec}",
            f"--workdir={workdir}",
            *cli.override_flags(applicable(spec, fields)),
        ],
        [*module("mesanet_jax.evaluate"), f"--workdir={workdir}", *cli.override_flags(EXACT if has_memory else {})],
    ]


def of_size(size: str, models: tuple[str, ...]) -> list[str]:
    """Returns the specs of models at a size."""
    return [f"configs/{model.format(size)}" for model in models]


def recall_values(args: argparse.Namespace) -> dict[str, str]:
    """Returns the overrides of the runs on recall; the rows themselves state their length and vocabulary."""
    rows = PackedRows(args.recall, "train")
    given = dict(pair.split("=", 1) for pair in filter(None, args.recall_values.split(",")))
    of_rows = {"data.path": args.recall, "data.seq_len": str(rows.seq_len), "model.vocab_size": str(rows.vocab_size)}
    return of_rows | given


if __name__ == "__main__":
    cli.run(main)
