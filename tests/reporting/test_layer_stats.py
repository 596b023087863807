"""Tests layer statistics: from the layers to scalars, and to plots."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import hawk_mesa, mesanet
from mesanet_jax import models
from mesanet_jax.reporting import layer_stats


def stats_of(config, tokens_BT, segment_ids_BT):
    model = models.build(config.model)
    params = jax.jit(model.init)(jax.random.key(0))
    batch = {"inputs": jnp.asarray(tokens_BT), "segment_ids": jnp.asarray(segment_ids_BT)}
    return jax.device_get(jax.jit(model.layer_stats)(params, batch))


@pytest.fixture(scope="module")
def rows():
    tokens_BT = np.random.default_rng(0).integers(0, 512, (2, 64)).astype(np.int32)
    return tokens_BT, np.zeros_like(tokens_BT)


def test_every_mesa_layer_reports_its_solver_iterations(rows):
    """Five layers of (hawk, mesa): two periods, and a last layer that is not mesa."""
    config = hawk_mesa.get_config("smoke")
    config.model.layers, config.model.mesa.tol = 5, 1e-3
    layers = stats_of(config, *rows)["solver_iterations"]
    assert list(layers) == [1, 3] and all(x.shape == (config.model.heads,) for x in layers.values())
    assert all(x.min() > 0 and x.max() < config.model.mesa.max_iters for x in layers.values())
    config.model.mesa.tol = 1e-1
    looser = stats_of(config, *rows)["solver_iterations"]
    assert all(np.all(looser[layer] < layers[layer]) for layer in layers)
    config.model.pattern = ("mesa", "hawk")  # now the last layer is mesa
    assert list(stats_of(config, *rows)["solver_iterations"]) == [0, 2, 4]


def test_a_fixed_number_of_iterations_is_not_reported(rows):
    assert stats_of(mesanet.get_config("smoke"), *rows) == {}


def test_scalars_and_back(tmp_path):
    stats = {"solver_iterations": {1: np.array([2.0, 4.0]), 12: np.array([6.0, 8.0])}}
    flat = layer_stats.scalars(stats)
    assert flat["solver_iterations"] == 5.0 and flat["solver_iterations/layer_12/head_1"] == 8.0
    layers, grid_LH = layer_stats.grid(flat, "solver_iterations")
    assert layers == [1, 12]
    np.testing.assert_array_equal(grid_LH, [[2, 4], [6, 8]])
    layer_stats.plot(flat, tmp_path / "last", title="a run")
    layer_stats.plot({"loss": 1.0}, tmp_path / "other", title="a run without a solver")
    assert [path.name for path in tmp_path.iterdir()] == ["last-solver_iterations.png"]


def test_mixtures_by_depth(tmp_path):
    """The weights of a mixture, one scalar per layer and branch, come from the newest record that has them."""
    stats = {"mixture/gss": {0: np.float32(0.5), 10: np.float32(0.25)}, "mixture/ffn_auxiliary": {0: 0.5, 10: 0.75}}
    flat = layer_stats.scalars(stats)
    assert flat["mixture/gss"] == 0.375 and flat["mixture/gss/layer_10"] == 0.25
    curves = layer_stats.curves(flat, "mixture")
    assert curves == {"gss": {0: 0.5, 10: 0.25}, "ffn_auxiliary": {0: 0.5, 10: 0.75}}
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join(json.dumps({"step": step} | extra) + "\n" for step, extra in ((1, flat), (2, {}))))
    assert layer_stats.newest(metrics) == {"step": 1} | flat
    layer_stats.plot(layer_stats.newest(metrics), tmp_path / "last", title="a run")
    assert (tmp_path / "last-mixture.png").read_bytes().startswith(b"\x89PNG")
