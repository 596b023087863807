"""Draws the training losses of several runs in one picture: `python -m scripts.results.plot_losses OUT.png LABEL=METRICS.jsonl...`"""

import pathlib
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mesanet_jax.reporting.plots import STYLE
from mesanet_jax.reporting.trackers import read_json_lines


def main(png: str, *runs: str) -> None:
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for run in runs:
            label, _, path = run.partition("=")
            records = [record for record in read_json_lines(pathlib.Path(path)) if "loss" in record]
            steps, losses = zip(*((record["step"], record["loss"]) for record in records), strict=True)
            axes.plot(steps, losses, "o-", markersize=2.5, linewidth=1.2, label=label)
        axes.set(xlabel="step", ylabel="training loss (nats / token)")
        axes.legend()
        figure.savefig(png)


if __name__ == "__main__":
    main(*sys.argv[1:])
