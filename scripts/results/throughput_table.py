"""Prints a Markdown table of the speed of finished runs: `python -m scripts.results.throughput_table WORKDIR...`

Medians over the logged steps of each run's `metrics.jsonl`, its first ten steps left out.
"""

import json
import pathlib
import statistics
import sys

WARM_UP = 10  # steps: compilation, caches, clocks


def row(workdir: pathlib.Path) -> str:
    config = json.loads((workdir / "config.json").read_text())
    records = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    timed = [record for record in records if "tokens_per_second" in record and record["step"] > WARM_UP]
    if not timed:
        sys.exit(f"error: {workdir}: no timed step after step {WARM_UP}")
    median = lambda name: statistics.median(record[name] for record in timed)
    speed, mfu, memory = median("tokens_per_second"), 100 * median("mfu"), max(record["memory_gb"] for record in timed)
    losses = [record["loss"] for record in records if "loss" in record]
    data = config["data"]
    return (
        f"| {config['name']} | {data['batch_size']} x {data['seq_len']} | {config['train']['rows_per_device']} | {config['model']['remat']} "
        f"| {speed:,.0f} | {mfu:.1f} % | {memory:.1f} GB | {losses[0]:.3f} -> {losses[-1]:.3f} |"
    )


if __name__ == "__main__":
    print("| run | batch x row | rows a device | remat | tokens/s | MFU | peak memory | loss, first -> last step |")
    print("| --- | --- | ---: | --- | ---: | ---: | ---: | --- |")
    for name in sys.argv[1:]:
        print(row(pathlib.Path(name)))
