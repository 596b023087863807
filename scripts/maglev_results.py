"""Everything that docs/results/maglev.md is to report, on one GPU: `python scripts/maglev_results.py --data=DATA --recall=RECALL --out=DIR`

DATA are rows of text (mesanet_jax.prepare), RECALL rows of delayed recall whose delay is beyond the reach of the stacked
windows of `--recall_size`:

    python -m mesanet_jax.recall --config.output=RECALL --config.seq_len=512 --config.delay=300

First what a training step costs, alone on the GPU; then the runs, `--jobs` at once, on text and on recall; then a report on
each (DIR/text/comparison.md, DIR/recall/comparison.md). Each step prints its command, and running this again goes on where it
stopped. --dry_run prints the commands alone. `--config.FIELD=VALUE` holds for the runs on text, `--recall_values=FIELD=VALUE,...`
for those on recall.
"""

import pathlib
import sys

from mesanet_jax import cli
from mesanet_jax.data.rows import PackedRows

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # for `scripts`

from scripts.chains import carry_out, module  # noqa: E402

# The Transformer that Maglev's cost is measured against is the last.
MODELS = (
    "maglev.py:{}", "maglev.py:{}-separate", "lrt.py:{}", "lrt.py:{}-k2", "maglev.py:{}-interleaved", "maglev.py:{}-sliding"
)  # fmt: skip


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--data", required=True, help="rows of text, written by mesanet_jax.prepare")
    flags.add_argument("--recall", required=True, help="rows written by mesanet_jax.recall")
    flags.add_argument("--out", required=True, type=pathlib.Path, help="where runs and reports are kept")
    flags.add_argument("--size", default="d12", help="of configs/maglev.py and lrt.py, on text")
    flags.add_argument("--recall_size", default="demo", help="the same on recall")
    flags.add_argument("--steps", type=int, default=2000, help="updates of a run on text")
    flags.add_argument("--recall_steps", type=int, default=2000, help="the same on recall")
    flags.add_argument("--recall_values", default="", help="FIELD=VALUE,... of the runs on recall")
    flags.add_argument("--jobs", type=int, default=1, help="runs on the GPU at once; their speeds then mean nothing")
    flags.add_argument("--dry_run", action="store_true", help="print the commands alone")
    args, overrides = cli.parse(flags, argv)
    return 0 if carry_out(*commands(args, overrides), args.out, jobs=args.jobs, dry=args.dry_run) else 1


def commands(args, overrides: dict[str, str]) -> tuple[list[str], dict[str, list[list[str]]], list[list[str]]]:
    """What measures the cost of a step; of each run the command; and what then reports on runs together."""
    specs = [f"configs/{model.format(args.size)}" for model in MODELS]
    values = lambda fields: [f"--config.{path}={value}" for path, value in fields.items()]
    script = str(pathlib.Path(__file__).with_name("efficiency.py"))
    cost = [
        sys.executable,
        script,
        f"--out={args.out}/cost",
        f"--configs={','.join(specs)}",
        "--kinds=training",
        "--lengths=2048",
    ]

    tasks = {
        "text": (args.size, args.steps, overrides | {"data.path": args.data}),
        "recall": (args.recall_size, args.recall_steps, recall_values(args)),
    }
    chains, reports = {}, []
    for task, (size, steps, fields) in tasks.items():
        where = [f"--workdir={args.out}/{task}", f"--steps={steps}", *values(fields)]
        specs = [f"configs/{model.format(size)}" for model in MODELS]
        for spec in specs:
            name = spec.removeprefix("configs/").replace(".py:", "-")
            chains[f"{task}-{name}"] = [[*module("compare"), f"--configs={spec}", *where]]
        reports.append([*module("compare"), f"--configs={','.join(specs)}", *where])
    return cost, chains, reports


def recall_values(args) -> dict[str, str]:
    """The rows say how long they are, and what their tokens are."""
    rows = PackedRows(args.recall, "train")
    given = dict(pair.split("=", 1) for pair in filter(None, args.recall_values.split(",")))
    of_rows = {"data.path": args.recall, "data.seq_len": str(rows.seq_len), "model.vocab_size": str(rows.vocab_size)}
    return of_rows | given


if __name__ == "__main__":
    cli.run(main)
