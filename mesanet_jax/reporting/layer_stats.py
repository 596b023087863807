"""Layer statistics, such as the solver's iterations or the weights of a mixture, as scalars and as plots.

`Model.layer_stats` computes them for each layer, and for each head where the layer has heads. L: layers, H: heads.
"""

import pathlib
import re
from collections.abc import Mapping

import numpy as np
from etils import epath

from mesanet_jax.reporting.plots import plot_grid, plot_layers
from mesanet_jax.reporting.trackers import read_json_lines

LABELS = {"solver_iterations": "solver iterations (mean over tokens)"}  # drawn as a grid of layers and heads
# Drawn as curves over the layers: "mixture/gss" is one of the curves of "mixture".
MIXTURES = {"mixture": "weight of the branch", "ffn_mixture": "weight of the network"}


def scalars(layer_stats: Mapping[str, Mapping[int, np.ndarray]]) -> dict[str, float]:
    """Returns the statistics {name: {layer: [H] or scalar}} as scalars.

    Their names are "name/layer_03/head_1", or "name/layer_03" without heads, and "name" for the mean over all.
    """
    flat = {}
    for name, layers in layer_stats.items():
        flat[name] = float(np.mean(list(layers.values())))
        for layer, values in layers.items():
            flat |= _named(f"{name}/layer_{layer:02}", values)
    return flat


def _named(layer: str, values: np.ndarray) -> dict[str, float]:
    if np.ndim(values) == 0:
        return {layer: float(values)}
    return {f"{layer}/head_{head}": float(value) for head, value in enumerate(values)}


def newest(metrics: epath.Path | pathlib.Path) -> dict[str, float]:
    """Returns the newest record of a `metrics.jsonl` that holds layer statistics, or {} if none does."""
    return next((record for record in reversed(read_json_lines(metrics)) if _has_stats(record)), {})


def _has_stats(record: Mapping[str, float]) -> bool:
    names = {key.partition("/")[0] for key in record}
    return not names.isdisjoint(LABELS.keys() | MIXTURES.keys())


def plot(record: Mapping[str, float], stem: epath.Path, *, title: str) -> None:
    """Draws the layer statistics of a record, if it has any, as STEM-NAME.png."""
    for name, label in LABELS.items():
        if name in record:
            layers, grid_LH = grid(record, name)
            plot_grid(grid_LH, stem.with_name(f"{stem.name}-{name}.png"), rows=layers, label=label, title=title)
    for name, label in MIXTURES.items():
        if branches := curves(record, name):
            plot_layers(branches, stem.with_name(f"{stem.name}-{name}.png"), ylabel=label, title=title)


def grid(record: Mapping[str, float], name: str) -> tuple[list[int], np.ndarray]:
    """Returns the layers that have the statistic `name` in a record, and its values [L,H]."""
    values: dict[int, dict[int, float]] = {}
    for key, value in record.items():
        if match := re.fullmatch(rf"{name}/layer_(\d+)/head_(\d+)", key):
            values.setdefault(int(match[1]), {})[int(match[2])] = value
    layers = sorted(values)
    return layers, np.array([[values[layer][head] for head in sorted(values[layer])] for layer in layers])


def curves(record: Mapping[str, float], name: str) -> dict[str, dict[int, float]]:
    """Returns the weights of a mixture in a record as {branch: {layer: weight}}."""
    found: dict[str, dict[int, float]] = {}
    for key, value in record.items():
        if match := re.fullmatch(rf"{name}/(\w+)/layer_(\d+)", key):
            found.setdefault(match[1], {})[int(match[2])] = value
    return found
