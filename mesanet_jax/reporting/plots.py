"""The plots of runs, as PNG files: training curves, loss by position, and values by layer."""

import itertools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from etils import epath

from mesanet_jax.reporting.trackers import read_json_lines

type Curve = tuple[np.ndarray, np.ndarray]  # steps and values

BLUE, ORANGE, GREY = "#3b6fb6", "#d9782d", "0.55"
# Colour and dash together distinguish up to 18 curves.
COLOURS = ("#3b6fb6", "#d9782d", "#2e8b57", "#b5373c", "#7d55a8", "#444444")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
# Metrics of models with a memory: a term of their objective, and the gap between two ways to compute the loss.
TERMS = {"consistency": "consistency loss", "validation_gap_lifted": "lifted - deployed loss\n(nats / token)"}
STYLE: dict[Any, Any] = {
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


def pyplot():
    """Imports matplotlib.pyplot, which takes a second, with a backend that needs no display."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def save(figure, png: epath.PathLike) -> None:
    """Writes a figure to a file, which may be in a bucket, and frees it."""
    with epath.Path(png).open("wb") as file:  # a stream, because matplotlib cannot open paths in buckets
        figure.savefig(file, format="png")
    pyplot().close(figure)


def plot_training(metrics: epath.Path | pathlib.Path, png: epath.Path, *, title: str) -> None:
    """Draws the training loss, the validation loss and the learning rate of a `metrics.jsonl`."""
    plt, records = pyplot(), read_json_lines(metrics)
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(7, 5), sharex=True, height_ratios=(4, 1), layout="constrained"
        )
        steps, loss = training_loss(records)
        top.plot(steps, loss, color=BLUE, linewidth=0.6, alpha=0.35)
        top.plot(steps, _smooth(loss), color=BLUE, linewidth=1.6, label="training")
        validation = series(records, "validation_loss")
        if len(validation[0]):
            top.plot(*validation, "o-", color=ORANGE, markersize=4, linewidth=1, label="validation")
        top.set(title=title, ylabel="loss (nats / token)")
        top.legend()
        bottom.plot(*series(records, "learning_rate"), color=GREY)
        bottom.set(xlabel="step", ylabel="learning rate", ylim=(0, None))
        bottom.ticklabel_format(axis="y", scilimits=(-2, 2))
        save(figure, png)


def terms(records: list[dict[str, Any]]) -> dict[str, Curve]:
    """Returns the curves of those `TERMS` that a run has."""
    return {name: curve for name in TERMS if len((curve := series(records, name))[0])}


def plot_terms(runs: Mapping[str, Mapping[str, Curve]], png: epath.Path, *, title: str) -> None:
    """Draws one panel for each of `TERMS`, or nothing if no run has any.

    Args:
      runs: the `terms` of each run by its label. A run without any still takes a colour, so that every run has the same
        colour as in `plot_losses` and `plot_positions`.
    """
    names = [name for name in TERMS if any(name in curves for curves in runs.values())]
    if not names:
        return
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(names), 1, figsize=(8, 2.6 * len(names)), sharex=True, squeeze=False, layout="constrained"
        )
        for axis, name in zip(axes[:, 0], names):
            for look, (label, curves) in zip(_looks(), runs.items()):
                if name in curves:
                    axis.plot(*curves[name], marker="o", markersize=3, linewidth=1.2, label=label, **look)
            axis.set(ylabel=TERMS[name])
            if len(runs) > 1:
                _legend_beside(axis)
        axes[0, 0].set(title=title)
        axes[-1, 0].set(xlabel="step")
        save(figure, png)


def training_loss(records: list[dict[str, Any]]) -> Curve:
    """Returns the steps and the cross-entropy of a run in nats per token.

    Where the objective has no other terms, the cross-entropy is logged as the loss itself.
    """
    name = "cross_entropy" if any("cross_entropy" in record for record in records) else "loss"
    return series(records, name)


def plot_grid(grid_LH: np.ndarray, png: epath.Path, *, rows: Sequence[int], label: str, title: str) -> None:
    """Draws a value [L,H] of each layer and head as a coloured square with its number.

    Args:
      rows: the numbers of the L layers.
      label: what the values are.
    """
    plt = pyplot()
    layers, heads = grid_LH.shape
    with plt.rc_context(STYLE):
        size = (max(6.0, 2.5 + 0.5 * heads), max(3.0, 1.5 + 0.3 * layers))  # inches; leaves room for the title
        figure, axes = plt.subplots(figsize=size, layout="constrained")
        image = axes.imshow(grid_LH, cmap="viridis", aspect="auto")
        middle = (grid_LH.min() + grid_LH.max()) / 2
        for (row, head), value in np.ndenumerate(grid_LH):
            colour = "white" if value <= middle else "black"
            axes.text(head, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=8)
        axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(heads))
        axes.set_yticks(range(layers), labels=map(str, rows))
        axes.grid(False)
        figure.colorbar(image, label=label)
        save(figure, png)


def plot_layers(curves: Mapping[str, Mapping[int, float]], png: epath.Path, *, ylabel: str, title: str) -> None:
    """Draws one curve over the layers for each label of `curves`, {label: {layer: value}}."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
        for look, (label, by_layer) in zip(_looks(), curves.items()):
            axes.plot(*zip(*sorted(by_layer.items())), marker="o", markersize=4, linewidth=1.4, label=label, **look)
        highest = max(max(by_layer.values()) for by_layer in curves.values())
        axes.set(title=title, xlabel="layer", ylabel=ylabel, ylim=(0, 1.08 * highest or None))
        axes.xaxis.get_major_locator().set_params(integer=True)  # pyright: ignore[reportCallIssue]
        _legend_beside(axes)
        save(figure, png)


def series(records: list[dict[str, Any]], name: str) -> Curve:
    """Returns the steps and the finite values of one scalar in the records of a `metrics.jsonl`."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, float)


def _smooth(values: np.ndarray, *, share: int = 50) -> np.ndarray:
    """Returns a centred moving mean over 1/`share` of the curve; towards the ends its window shrinks."""
    half = len(values) // (2 * share)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def plot_losses(runs: Mapping[str, Curve], png: epath.Path, *, title: str) -> None:
    """Draws the smoothed training losses of several runs, {label: (steps, nats per token)}.

    The vertical axis shows the last four fifths of the curves; the high losses before would press the rest into a line.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
        tops = []
        for look, (label, (steps, loss)) in zip(_looks(), runs.items()):
            smoothed = _smooth(loss, share=10)
            axes.plot(steps, smoothed, linewidth=1.4, label=label, **look)
            tops.extend(smoothed[len(smoothed) // 5 :])
        axes.set(title=title, xlabel="step", ylabel="loss (nats / token), smoothed")
        if tops:
            axes.set_ylim(top=max(tops))
        _legend_beside(axes)
        save(figure, png)


def _looks() -> Iterator[dict[str, Any]]:
    """Yields the colour and dash of one curve after another, without end."""
    looks = [{"color": colour, "linestyle": dash} for dash, colour in itertools.product(DASHES, COLOURS)]
    return itertools.cycle(looks)


def _legend_beside(axes) -> None:
    """Puts the legend beside the axes, ordered by the last values of the curves, the highest on top."""
    curves = zip(*axes.get_legend_handles_labels())
    handles, labels = zip(*sorted(curves, key=lambda curve: _last_value(curve[0]), reverse=True))
    axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.6)


def _last_value(line) -> float:
    values = line.get_ydata()
    return values[-1] if len(values) else -np.inf


def plot_positions(
    results: Mapping[str, np.ndarray], png: epath.Path, *, title: str, ylabel: str = "loss (nats / token)"
) -> None:
    """Draws the loss by token position, one curve per label; `results` holds mean nats [T], NaN where unknown."""
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        for look, (label, loss_T) in zip(_looks(), results.items()):
            axes.plot(*_bin_by_log(np.asarray(loss_T)), marker="o", markersize=3, linewidth=1.4, label=label, **look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda position, _: f"{position:g}")
        axes.set(title=title, xlabel="token position in the row", ylabel=ylabel)
        _legend_beside(axes)
        save(figure, png)


def _bin_by_log(loss_T: np.ndarray, per_octave: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Returns means over bins of equal width in log2(position), since single positions far into the row are noise."""
    position_T = np.arange(1, len(loss_T) + 1)
    known = np.isfinite(loss_T)
    bins = np.round(np.log2(position_T[known]) * per_octave).astype(int)
    _, group, count = np.unique(bins, return_inverse=True, return_counts=True)

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(group, values) / count

    return 2 ** mean(np.log2(position_T[known])), mean(loss_T[known])
