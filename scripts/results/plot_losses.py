"""Draws the training losses of several runs in one picture:

python -m scripts.results.plot_losses OUT.png LABEL=METRICS.jsonl [LABEL=METRICS.jsonl ...]
"""

import argparse
import pathlib

from mesanet_jax.reporting import plots
from mesanet_jax.reporting.trackers import read_json_lines


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("png", type=pathlib.Path, help="the file to write")
    flags.add_argument("runs", nargs="+", metavar="LABEL=METRICS.jsonl", help="a run's label and its metrics")
    args = flags.parse_args()
    plt = plots.pyplot()
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for run in args.runs:
            label, _, path = run.partition("=")
            records = [record for record in read_json_lines(pathlib.Path(path)) if "loss" in record]
            steps, losses = zip(*((record["step"], record["loss"]) for record in records), strict=True)
            axes.plot(steps, losses, "o-", markersize=2.5, linewidth=1.2, label=label)
        axes.set(xlabel="step", ylabel="training loss (nats / token)")
        axes.legend()
        plots.save(figure, args.png)


if __name__ == "__main__":
    main()
