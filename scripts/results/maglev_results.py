"""Everything that docs/results/maglev.md is to report, on one GPU: `python -m scripts.results.maglev_results --data=DATA --recall=RECALL --out=DIR`

DATA are rows of text (mesanet_jax.prepare), RECALL rows of delayed recall whose delay is beyond the reach of the stacked
windows of `--recall_size`:

    python -m mesanet_jax.recall --config.output=RECALL --config.seq_len=512 --config.delay=300

First what a training step costs, alone on the GPU; then the runs, `--jobs` at once, on text and on recall (Maglev once more with
the small lambda of `--weak`), models with a memory scored exactly, a step a token; then a report on each (DIR/text/comparison.md,
recall, recall-weak). Each step prints its command, and running this again goes on where it stopped. --dry_run prints the commands
alone. `--config.FIELD=VALUE` holds for the runs on text, `--recall_values=FIELD=VALUE,...` for those on recall, an option of a
kind of model for those that have it.
"""

import pathlib
import sys

from mesanet_jax import cli, schema
from mesanet_jax import config as config_lib
from mesanet_jax.comparing.runs import applicable
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.reporting.evaluation_report import file_stem
from scripts.results.chains import carry_out, module

ROOT = pathlib.Path(__file__).parents[2]

MAGLEV = ("maglev.py:{}", "maglev.py:{}-separate")
# The Transformer that Maglev's cost is measured against is the last.
MODELS = (*MAGLEV, "lrt.py:{}", "lrt.py:{}-k2", "maglev.py:{}-interleaved", "maglev.py:{}-sliding")
# Of an exact evaluation: a step a token takes as long for some rows as for one; more would make the logits too large.
EXACT = {"model.deployed_by": "steps", "data.batch_size": "40", "train.rows_per_device": "40"}


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--data", required=True, help="rows of text, written by mesanet_jax.prepare")
    flags.add_argument("--recall", required=True, help="rows written by mesanet_jax.recall")
    flags.add_argument("--out", required=True, type=pathlib.Path, help="where runs and reports are kept")
    flags.add_argument("--cost_size", default="d12", help="of configs/maglev.py and lrt.py, whose step is measured")
    flags.add_argument("--size", default="d12", help="the same on text")
    flags.add_argument("--recall_size", default="demo", help="the same on recall")
    flags.add_argument("--steps", type=int, default=2000, help="updates of a run on text")
    flags.add_argument("--recall_steps", type=int, default=2000, help="the same on recall")
    flags.add_argument("--recall_values", default="", help="FIELD=VALUE,... of the runs on recall")
    flags.add_argument("--weak", default="0.01", help="lambda of Maglev's second runs on recall")
    flags.add_argument("--jobs", type=int, default=1, help="runs on the GPU at once; their speeds then mean nothing")
    flags.add_argument("--dry_run", action="store_true", help="print the commands alone")
    args, overrides = cli.parse(flags, argv)
    return 0 if carry_out(*commands(args, overrides), args.out, jobs=args.jobs, dry=args.dry_run) else 1


def commands(args, overrides: dict[str, str]) -> tuple[list[str], dict[str, list[list[str]]], list[list[str]]]:
    """What measures the cost of a step; of each run the commands; and what then reports on runs together."""
    specs = f"--configs={','.join(of_size(args.cost_size, MODELS))}"
    cost = [
        sys.executable,
        "-m",
        "scripts.results.efficiency",
        f"--out={args.out}/cost",
        specs,
        "--kinds=training",
        "--lengths=2048",
    ]

    recall = recall_values(args)
    weak = recall | {"model.consistency_weight": args.weak}
    tasks = {
        "text": (of_size(args.size, MODELS), args.steps, overrides | {"data.path": args.data}),
        "recall": (of_size(args.recall_size, MODELS), args.recall_steps, recall),
        "recall-weak": (of_size(args.recall_size, MAGLEV), args.recall_steps, weak),
    }
    chains, reports = {}, []
    for task, (specs, steps, fields) in tasks.items():
        fields = fields | {"steps": str(steps)}
        for spec in specs:
            name = spec.removeprefix("configs/").replace(".py:", "-")
            chains[f"{task}-{name}"] = run(spec, args.out / task / name, fields)
        reports.append([
            *module("compare"), f"--configs={','.join(specs)}", f"--workdir={args.out}/{task}", *cli.override_flags(fields)
        ])  # fmt: skip
    return cost, chains, reports


def run(spec: str, workdir: pathlib.Path, fields: dict[str, str]) -> list[list[str]]:
    """What trains a model and scores it, if that is not done: `compare`'s own commands, but for the exact evaluation."""
    if (workdir / "evaluation" / f"{file_stem('validation', int(fields['steps']))}.png").exists():
        return []
    has_memory = "model.deployed_by" in schema.flatten(config_lib.load(spec, {}))
    return [
        [*module("train"), f"--config={spec}", f"--workdir={workdir}", *cli.override_flags(applicable(spec, fields))],
        [*module("evaluate"), f"--workdir={workdir}", *cli.override_flags(EXACT if has_memory else {})],
    ]


def of_size(size: str, models: tuple[str, ...]) -> list[str]:
    return [f"configs/{model.format(size)}" for model in models]


def recall_values(args) -> dict[str, str]:
    """The rows say how long they are, and what their tokens are."""
    rows = PackedRows(args.recall, "train")
    given = dict(pair.split("=", 1) for pair in filter(None, args.recall_values.split(",")))
    of_rows = {"data.path": args.recall, "data.seq_len": str(rows.seq_len), "model.vocab_size": str(rows.vocab_size)}
    return of_rows | given


if __name__ == "__main__":
    cli.run(main)
