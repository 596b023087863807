"""The plots of a run, as PNG files: training curves and loss by position."""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from mesanet_jax.reporting.trackers import read_json_lines

BLUE, ORANGE, GREY = "#3b6fb6", "#d9782d", "0.55"
# A dozen curves are told apart by colour and dash together.
COLOURS = ("#3b6fb6", "#d9782d", "#2e8b57", "#b5373c", "#7d55a8", "#444444")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)))
# Of models with a memory: a term of the objective, and what another way to compute the loss gains over decoding.
TERMS = {"consistency": "consistency loss", "validation_gap_lifted": "lifted less deployed\n(nats / token)"}
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


def _save(figure, png: epath.Path) -> None:
    """Writes a drawn figure, and forgets it; by a stream, since matplotlib knows no buckets."""
    import matplotlib.pyplot as plt

    with png.open("wb") as file:
        figure.savefig(file, format="png")
    plt.close(figure)


def plot_training(metrics: epath.Path, png: epath.Path, *, title: str) -> None:
    """Training and validation loss, and the learning rate below, from a `metrics.jsonl`."""
    plt, records = _pyplot(), read_json_lines(metrics)
    with plt.rc_context(STYLE):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(7, 5), sharex=True, height_ratios=(4, 1), layout="constrained"
        )  # fmt: skip
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
        _save(figure, png)


def terms(records: list[dict]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Steps and values of those of TERMS that a run has."""
    return {name: curve for name in TERMS if len((curve := series(records, name))[0])}


def plot_terms(runs: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]], png: epath.Path, *, title: str) -> None:
    """A panel for each of TERMS; `runs` maps a label to its `terms`. Draws nothing where no run has any.

    A run without any takes a colour all the same, so that each has that of `plot_losses` and `plot_positions`.
    """
    names = [name for name in TERMS if any(name in curves for curves in runs.values())]
    if not names:
        return
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(names), 1, figsize=(8, 2.6 * len(names)), sharex=True, squeeze=False, layout="constrained"
        )  # fmt: skip
        for axis, name in zip(axes[:, 0], names):
            for look, (label, curves) in zip(_looks(), runs.items()):
                if name in curves:
                    axis.plot(*curves[name], marker="o", markersize=3, linewidth=1.2, label=label, **look)
            axis.set(ylabel=TERMS[name])
            if len(runs) > 1:
                _legend_beside(axis)
        axes[0, 0].set(title=title)
        axes[-1, 0].set(xlabel="step")
        _save(figure, png)


def training_loss(records: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Steps and nats a token: the cross-entropy where the objective has other terms, else the loss, which then is it."""
    name = "cross_entropy" if any("cross_entropy" in record for record in records) else "loss"
    return series(records, name)


def plot_grid(grid_LH: np.ndarray, png: epath.Path, *, rows: Sequence[int], label: str, title: str) -> None:
    """A value of each layer and head as a coloured square with its number; `rows` are the layers' numbers."""
    plt = _pyplot()
    layers, heads = grid_LH.shape
    with plt.rc_context(STYLE):
        size = (max(6.0, 2.5 + 0.5 * heads), max(3.0, 1.5 + 0.3 * layers))  # inches; room for the title
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
        _save(figure, png)


def plot_layers(curves: Mapping[str, Mapping[int, float]], png: epath.Path, *, ylabel: str, title: str) -> None:
    """A value of each layer by depth, one curve a label."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
        for look, (label, by_layer) in zip(_looks(), curves.items()):
            axes.plot(*zip(*sorted(by_layer.items())), marker="o", markersize=4, linewidth=1.4, label=label, **look)
        highest = max(max(by_layer.values()) for by_layer in curves.values())
        axes.set(title=title, xlabel="layer", ylabel=ylabel, ylim=(0, 1.08 * highest or None))
        axes.xaxis.get_major_locator().set_params(integer=True)
        _legend_beside(axes)
        _save(figure, png)


def series(records: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and finite values of one scalar in the records of a `metrics.jsonl`."""
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, float)


def _smooth(values: np.ndarray, *, share: int = 50) -> np.ndarray:
    """A centred mean over one `share`-th of the curve, over less towards its ends (so that they are not bent)."""
    half = len(values) // (2 * share)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    reach = np.minimum(half, np.minimum(index, len(values) - 1 - index))
    return (sums[index + reach + 1] - sums[index - reach]) / (2 * reach + 1)


def plot_losses(runs: Mapping[str, tuple[np.ndarray, np.ndarray]], png: epath.Path, *, title: str) -> None:
    """Smoothed training losses of several runs; `runs` maps a label to steps and nats a token.

    The first fifth of the curves may leave the top: it would press the rest into a line.
    """
    plt = _pyplot()
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
        _save(figure, png)


def _looks() -> Iterator[dict]:
    """Colours and dashes of one curve after another, without end."""
    looks = [{"color": colour, "linestyle": dash} for dash, colour in itertools.product(DASHES, COLOURS)]
    return itertools.cycle(looks)


def _legend_beside(axes) -> None:
    """Labels outside the axes, the highest end of a curve on top, as the eye finds them."""
    handles, labels = axes.get_legend_handles_labels()
    end = lambda pair: pair[0].get_ydata()[-1] if len(pair[0].get_ydata()) else -np.inf
    handles, labels = zip(*sorted(zip(handles, labels), key=end, reverse=True))
    axes.legend(handles, labels, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.6)


def plot_positions(
    results: Mapping[str, np.ndarray], png: epath.Path, *, title: str, ylabel: str = "loss (nats / token)"
) -> None:
    """Loss by token position, one curve a label; `results` maps a label to mean nats [T], NaN where unknown."""
    plt = _pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
        for look, (label, loss_T) in zip(_looks(), results.items()):
            axes.plot(*_bin_by_log(np.asarray(loss_T)), marker="o", markersize=3, linewidth=1.4, label=label, **look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda position, _: f"{position:g}")
        axes.set(title=title, xlabel="token position in the row", ylabel=ylabel)
        _legend_beside(axes)
        _save(figure, png)


def _bin_by_log(loss_T: np.ndarray, per_octave: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Means over bins of equal width in log2(position): single positions are noise at the far end."""
    position_T = np.arange(1, len(loss_T) + 1)
    known = np.isfinite(loss_T)
    bins = np.round(np.log2(position_T[known]) * per_octave).astype(int)
    _, group, count = np.unique(bins, return_inverse=True, return_counts=True)
    mean = lambda values: np.bincount(group, values) / count
    return 2 ** mean(np.log2(position_T[known])), mean(loss_T[known])
