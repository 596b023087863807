"""The plots of a run, as PNG files: training curves and loss by position."""

import pathlib
from collections.abc import Mapping

import numpy as np

from mesanet_jax.trackers import read_json_lines

BLUE, ORANGE, GREY = "#3b6fb6", "#d9782d", "0.55"
STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.92",
    "axes.edgecolor": "0.4",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "font.size": 10,
    "legend.frameon": False,
    "savefig.dpi": 150,
}


def _pyplot():
    """matplotlib takes a second to import and needs no display here."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def plot_training(metrics: pathlib.Path, png: pathlib.Path, *, title: str) -> None:
    """Training and validation loss, and the learning rate below, from a `metrics.jsonl`."""
    plt, records = _pyplot(), read_json_lines(metrics)
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(7, 5), sharex=True, height_ratios=(4, 1), layout="constrained"
        )  # fmt: skip
        steps, loss = _series(records, "loss")
        top.plot(steps, loss, color=BLUE, linewidth=0.6, alpha=0.35)
        top.plot(steps, _smooth(loss), color=BLUE, linewidth=1.6, label="training")
        validation = _series(records, "validation_loss")
        if len(validation[0]):
            top.plot(*validation, "o-", color=ORANGE, markersize=4, linewidth=1, label="validation")
        top.set(title=title, ylabel="loss (nats / token)")
        top.legend()
        bottom.plot(*_series(records, "learning_rate"), color=GREY)
        bottom.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        bottom.ticklabel_format(axis="y", scilimits=(-2, 2))
        figure.savefig(png)
        plt.close(figure)


def _series(records: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of one scalar."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, float)


def _smooth(values: np.ndarray) -> np.ndarray:
    """A centred mean over a fiftieth of the curve, over less towards its ends (so that they are not bent)."""
    half = len(values) // 100
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def plot_positions(results: Mapping[str, np.ndarray], png: pathlib.Path, *, title: str) -> None:
    """Loss by token position, one curve a label; `results` maps a label to mean nats [T], NaN where unknown."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for label, loss_T in results.items():
            axes.plot(*_bin_by_log(np.asarray(loss_T)), "o-", markersize=3, linewidth=1.4, label=label)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda position, _: f"{position:g}")
        axes.set(title=title, xlabel="token position in the row", ylabel="loss (nats / token)")
        axes.legend()
        figure.savefig(png)
        plt.close(figure)


def _bin_by_log(loss_T: np.ndarray, per_octave: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Means over bins of equal width in log2(position): single positions are noise at the far end."""
    position_T = np.arange(1, len(loss_T) + 1)
    known = np.isfinite(loss_T)
    bins = np.round(np.log2(position_T[known]) * per_octave).astype(int)
    _, group, count = np.unique(bins, return_inverse=True, return_counts=True)
    mean = lambda values: np.bincount(group, values) / count
    return 2 ** mean(np.log2(position_T[known])), mean(loss_T[known])
