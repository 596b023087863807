"""What layers tell about their work (`Model.layer_stats`): as scalars of the metrics, and drawn by layer, or layer and head.

L layers, H heads.
"""

import re
from collections.abc import Mapping

import numpy as np
from etils import epath

from mesanet_jax.reporting.plots import plot_grid, plot_layers
from mesanet_jax.reporting.trackers import read_json_lines

LABELS = {"solver_iterations": "solver iterations (mean over tokens)"}  # what is drawn, and how it is called
MIXTURES = {
    "mixture": "weight of the branch",
    "ffn_mixture": "weight of the network",
}  # "mixture/gss" is one of its curves


def scalars(told: Mapping[str, Mapping[int, np.ndarray]]) -> dict[str, float]:
    """{name: {layer: [H] or a scalar}} as "name/layer_03/head_1" or "name/layer_03", and as "name" itself the mean of all."""
    flat = {}
    for name, layers in told.items():
        flat[name] = float(np.mean(list(layers.values())))
        for layer, values in layers.items():
            flat |= _named(f"{name}/layer_{layer:02}", values)
    return flat


def _named(layer: str, values: np.ndarray) -> dict[str, float]:
    if np.ndim(values) == 0:
        return {layer: float(values)}
    return {f"{layer}/head_{head}": float(value) for head, value in enumerate(values)}


def newest(metrics: epath.Path) -> dict[str, float]:
    """The newest record of a `metrics.jsonl` that holds an observation; an empty one where there is none."""
    records = read_json_lines(metrics)
    told = lambda record: {key.partition("/")[0] for key in record} & (LABELS.keys() | MIXTURES.keys())
    return next((record for record in reversed(records) if told(record)), {})


def plot(record: Mapping[str, float], stem: epath.Path, *, title: str) -> None:
    """Draws the observations of a record, if any, as STEM-NAME.png."""
    for name, label in LABELS.items():
        if name in record:
            layers, grid_LH = grid(record, name)
            plot_grid(grid_LH, stem.with_name(f"{stem.name}-{name}.png"), rows=layers, label=label, title=title)
    for name, label in MIXTURES.items():
        if branches := curves(record, name):
            plot_layers(branches, stem.with_name(f"{stem.name}-{name}.png"), ylabel=label, title=title)


def grid(record: Mapping[str, float], name: str) -> tuple[list[int], np.ndarray]:
    """The layers that an observation of a record is about, and its values [L,H]."""
    values: dict[int, dict[int, float]] = {}
    for key, value in record.items():
        if match := re.fullmatch(rf"{name}/layer_(\d+)/head_(\d+)", key):
            values.setdefault(int(match[1]), {})[int(match[2])] = value
    layers = sorted(values)
    return layers, np.array([[values[layer][head] for head in sorted(values[layer])] for layer in layers])


def curves(record: Mapping[str, float], name: str) -> dict[str, dict[int, float]]:
    """{branch: {layer: weight}} of a mixture."""
    found: dict[str, dict[int, float]] = {}
    for key, value in record.items():
        if match := re.fullmatch(rf"{name}/(\w+)/layer_(\d+)", key):
            found.setdefault(match[1], {})[int(match[2])] = value
    return found
