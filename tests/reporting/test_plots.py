"""Tests the plots of ordinary runs and of runs with few records."""

import json

import numpy as np
import pytest

from mesanet_jax.reporting import plots


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.parametrize("count", [0, 1, 10, 200])
def test_training_plot(tmp_path, count):
    records = [{"step": s, "loss": 5 / s if s % 7 else None, "learning_rate": 1e-3} for s in range(1, count + 1)]
    records += [{"step": s, "validation_loss": 5 / s} for s in range(5, count + 1, 5)]
    plots.plot_training(write(tmp_path / "metrics.jsonl", records), tmp_path / "loss.png", title="run")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_smoothing_keeps_a_line_straight():
    line = np.arange(300.0)
    np.testing.assert_allclose(plots._smooth(line), line)


def test_log_bins_keep_first_positions_and_the_mean():
    loss_T = np.random.default_rng(0).random(1000)
    loss_T[5] = np.nan
    position, loss = plots._bin_by_log(loss_T)
    assert position[0] == 1 and loss[0] == loss_T[0] and loss[1] == loss_T[1]
    assert (np.diff(position) > 0).all() and np.isfinite(loss).all() and len(position) < 50
