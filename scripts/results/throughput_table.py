"""Prints a Markdown table of the speed of finished runs: `python -m scripts.results.throughput_table WORKDIR...`

The values are medians over the logged steps in each run's `metrics.jsonl`, without its first ten steps.
"""

import argparse
import json
import pathlib
import statistics

WARM_UP = 10  # steps that are left out: compilation, caches, clocks
HEADER = """\
| run | batch x row | rows per device | remat | tokens/s | MFU | peak memory | loss, first -> last step |
| --- | --- | ---: | --- | ---: | ---: | ---: | --- |"""


def row(workdir: pathlib.Path) -> str:
    """Returns the row of a run."""
    config = json.loads((workdir / "config.json").read_text())
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    timed = [record for record in records if "tokens_per_second" in record and record["step"] > WARM_UP]
    if not timed:
        raise SystemExit(f"error: {workdir}: no timed step after step {WARM_UP}")
    speed, mfu = (statistics.median(record[name] for record in timed) for name in ("tokens_per_second", "mfu"))
    losses = [record["loss"] for record in records if "loss" in record]
    cells = (
        config["name"],
        f"{config['data']['batch_size']} x {config['data']['seq_len']}",
        f"{config['train']['rows_per_device']}",
        config["model"]["remat"],
        f"{speed:,.0f}",
        f"{100 * mfu:.1f} %",
        f"{max(record['memory_gb'] for record in timed):.1f} GB",
        f"{losses[0]:.3f} -> {losses[-1]:.3f}",
    )
    return f"| {' | '.join(cells)} |"


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("workdirs", nargs="+", type=pathlib.Path, help="directories of runs of mesanet_jax.train")
    args = flags.parse_args()
    print(HEADER)
    for workdir in args.workdirs:
        print(row(workdir))


if __name__ == "__main__":
    main()
