"""Runs everything that docs/results/pha.md reports, on one GPU:

    python -m scripts.results.pha_results --data=DATA --out=DIR

DATA is prepared beforehand: WikiText-103 as one text per split, with GPT-2's tokenizer,

    python -m mesanet_jax.prepare --config=configs/prepare.py:wikitext --config.input='TRAIN-*.parquet' \
        --config.validation_input=VALIDATION.parquet --config.test_input=TEST.parquet --config.output=DATA \
        --config.tokenizer.kind=huggingface --config.tokenizer.path=GPT2/tokenizer.json --config.seq_len=1024

or OpenWebText, whose held-out documents are chosen by a hash of the text (configs/prepare.py:openwebtext).

Each command is printed. Running the script again continues where it stopped: runs resume, and what is finished is not
repeated. --dry-run only prints the commands. --config.FIELD=VALUE sets a field of every run.
"""

import argparse
import json
import pathlib
import statistics
from collections.abc import Mapping, Sequence

from mesanet_jax import cli
from mesanet_jax.evals.stream import Windows
from mesanet_jax.reporting.evaluation_report import file_stem
from mesanet_jax.reporting.tables import markdown_table
from scripts.results.chains import Command, carry_out, module

ROOT = pathlib.Path(__file__).parents[2]

VARIANTS = (
    "",
    "-attention_only",
    "-sequential",
    "-no_gss",
    "-no_attention",
    "-no_auxiliary",
    "-uniform",
    "-no_branch_norm",
    "-alpha1",
)
# The variants that differ little run with every seed, the others only with the first seed.
SEVERAL_SEEDS = ("", "-sequential", "-attention_only", "-uniform")
WARM_UP_FREE = ("", "-sequential", "-attention_only")  # also trained without warm-up and clipping
FREE = {"optimizer.warmup_steps": "0", "optimizer.clip_norm": "none"}
WINDOWS = Windows(context=1024, stride=512)


def main(argv: list[str]) -> int:
    flags = cli.parser(__doc__)
    flags.add_argument("--data", required=True, help="a directory written by mesanet_jax.prepare")
    flags.add_argument("--out", required=True, type=pathlib.Path, help="directory of the runs and reports")
    flags.add_argument("--size", default="90m", help="size in configs/pha.py")
    flags.add_argument("--steps", type=int, default=4000, help="updates per run")
    flags.add_argument("--seeds", default="0,1,2", help="seeds of the weights and of the order of rows")
    flags.add_argument("--split", default="validation", help="split that the stream protocol scores")
    flags.add_argument("--efficiency", default="180m", help="size whose speed and memory are measured")
    flags.add_argument(
        "--jobs", type=int, default=1, help="runs on the GPU at once; with more than one, their speeds mean nothing"
    )
    flags.add_argument("--dry-run", action="store_true", help="only print the commands")
    args, overrides = cli.parse(flags, argv)
    good = carry_out(*commands(args, overrides), args.out, jobs=args.jobs, dry=args.dry_run)
    if not args.dry_run:
        (args.out / "seeds.md").write_text(table(args) + "\n")
        print((args.out / "seeds.md").read_text())
    return 0 if good else 1


def commands(
    args: argparse.Namespace, overrides: Mapping[str, str]
) -> tuple[Command, dict[str, list[Command]], list[Command]]:
    """Returns the command that measures efficiency, the commands of each run by its name, and those of the reports."""

    def compare(name: str, variants: Sequence[str], seed: str, more: Mapping[str, str] | None = None) -> Command:
        values = {**overrides, "data.path": args.data, "seed": seed, "data.seed": seed, **(more or {})}
        return [
            *module("mesanet_jax.compare"),
            f"--configs={','.join(f'configs/pha.py:{args.size}{variant}' for variant in variants)}",
            f"--workdir={args.out}/{name}",
            f"--steps={args.steps}",
            *cli.override_flags(values),
        ]

    def stream(workdir: str) -> Command:
        windows = (f"--context={WINDOWS.context}", f"--stride={WINDOWS.stride}")
        return [
            *module("mesanet_jax.evaluate"),
            f"--workdir={workdir}",
            f"--split={args.split}",
            "--protocol=stream",
            *windows,
        ]

    chains: dict[str, list[Command]] = {}
    reports: list[Command] = []
    seeds = args.seeds.split(",")
    for seed in seeds:
        variants = VARIANTS if seed == seeds[0] else SEVERAL_SEEDS
        for variant in variants:
            run = f"seed{seed}/pha-{args.size}{variant}"
            scored = stream_json(args, seed, variant).exists()
            scoring = [] if scored else [stream(f"{args.out}/{run}")]
            chains[run.replace("/", "-")] = [compare(f"seed{seed}", (variant,), seed), *scoring]
        reports.append(compare(f"seed{seed}", variants, seed))
    for variant in WARM_UP_FREE:
        chains[f"no_warm_up{variant}"] = [compare("no_warm_up", (variant,), seeds[0], FREE)]
    reports.append(compare("no_warm_up", WARM_UP_FREE, seeds[0], FREE))
    specs = f"configs/pha.py:{args.efficiency},configs/pha.py:{args.efficiency}-attention_only"
    return (
        [*module("scripts.results.efficiency"), f"--out={args.out}/efficiency", f"--configs={specs}"],
        chains,
        reports,
    )


def stream_json(args: argparse.Namespace, seed: str, variant: str) -> pathlib.Path:
    """Returns the path of a run's evaluation by the stream protocol."""
    name = file_stem(args.split, args.steps, WINDOWS)
    return args.out / f"seed{seed}" / f"pha-{args.size}{variant}" / "evaluation" / f"{name}.json"


def table(args: argparse.Namespace) -> str:
    """Returns a table of the scores of the stream protocol: mean and standard deviation over the finished seeds."""
    rows = []
    for variant in VARIANTS:
        paths = [path for seed in args.seeds.split(",") if (path := stream_json(args, seed, variant)).exists()]
        records = [json.loads(path.read_text()) for path in paths]
        cells = [
            spread([record[name] for record in records]) for name in ("perplexity", "word_perplexity", "bits_per_byte")
        ]
        parameters = f"{records[0]['parameters'] / 1e6:.2f}M" if records else "-"
        rows.append((f"pha-{args.size}{variant}", parameters, f"{len(records)}", *cells))
    return markdown_table(("run", "parameters", "seeds", "perplexity", "word-level", "bits / byte"), rows)


def spread(values: Sequence[float | None]) -> str:
    """Returns the mean and the standard deviation of the known values as text."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    deviation = f" +- {statistics.stdev(known):.4f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.4f}{deviation}"


if __name__ == "__main__":
    cli.run(main)
