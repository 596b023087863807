"""Tests that trackers never stop a run, and that a resumed metrics.jsonl holds every step once."""

import json
import math
import sys

import pytest

from mesanet_jax.config import default_config
from mesanet_jax.errors import UserError
from mesanet_jax.reporting import trackers


class Recorder:
    def __init__(self, fail_at: int | None = None):
        self.steps, self.fail_at, self.closed = [], fail_at, False

    def log(self, step, scalars):
        if step == self.fail_at:
            raise ConnectionError("quota\nexceeded")
        self.steps.append(step)

    def close(self):
        self.closed = True


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_failing_sink_is_reported_once_and_dropped(capsys):
    bad, good = Recorder(fail_at=2), Recorder()
    group = trackers.Trackers([bad, good])
    for step in (1, 2, 3):
        group.log(step, {"loss": 1.0})
    group.close()
    assert bad.steps == [1] and good.steps == [1, 2, 3]
    assert good.closed and not bad.closed
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and "Recorder" in errors[0] and "quota exceeded" in errors[0]


def test_failing_close_is_reported(capsys):
    sink = Recorder()
    sink.close = lambda: 1 / 0
    trackers.Trackers([sink]).close()
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_json_lines_are_flushed_line_by_line(tmp_path):
    sink = trackers.JsonLines(tmp_path / "metrics.jsonl")
    sink.log(1, {"loss": 2.5, "mfu": 0.25})
    (record,) = trackers.read_json_lines(tmp_path / "metrics.jsonl")  # before close
    assert record.pop("time") > 1.6e9
    assert record == {"step": 1, "loss": 2.5, "mfu": 0.25}


def test_nonfinite_values_are_valid_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = trackers.JsonLines(path)
    sink.log(1, {"loss": math.nan, "gradient_norm": math.inf, "learning_rate": 0.1})

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record["loss"] is None and record["gradient_norm"] is None and record["learning_rate"] == 0.1
    assert record["nonfinite"] == ["loss", "gradient_norm"]


def test_resume_drops_lost_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = trackers.JsonLines(path)
    for step in range(1, 7):
        sink.log(step, {"loss": float(step)})
    sink.close()
    with path.open("a") as file:
        file.write('{"step": 7, "lo')
    resumed = trackers.JsonLines(path, from_step=4)
    assert steps(path) == [1, 2, 3, 4]
    resumed.log(5, {"loss": 5.0})
    assert steps(path) == [1, 2, 3, 4, 5]
    assert [record.name for record in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        trackers.read_json_lines(path)


def test_make_trackers_writes_jsonl_and_tensorboard(tmp_path):
    group = trackers.make_trackers(default_config(("mesa",)), tmp_path, from_step=0)
    group.log(1, {"loss": 1.0})
    group.close()
    assert steps(tmp_path / "metrics.jsonl") == [1]
    assert any(file.stat().st_size > 0 for file in (tmp_path / "tensorboard").iterdir())


def test_other_processes_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(trackers.jax, "process_index", lambda: 1)
    group = trackers.make_trackers(default_config(("mesa",)), tmp_path, from_step=0)
    group.log(1, {"loss": 1.0})
    group.close()
    assert not list(tmp_path.iterdir())


def test_missing_wandb_is_an_error_at_start(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # makes `import wandb` fail
    config = default_config(("mesa",))
    config.log.wandb_project = "p"
    with pytest.raises(UserError, match=r"pip install mesanet-jax\[wandb\]"):
        trackers.make_trackers(config, tmp_path, from_step=0)


def test_wandb_resumes_the_same_run_and_may_fail_to_start(tmp_path, monkeypatch, capsys):
    calls = []

    class Package:
        @staticmethod
        def init(**options):
            calls.append(options)
            raise OSError("no network")

    monkeypatch.setitem(sys.modules, "wandb", Package)
    config = default_config(("mesa",))
    config.log.wandb_project = "p"
    for step in (0, 3):
        group = trackers.make_trackers(config, tmp_path, from_step=step)
        group.log(step + 1, {"loss": 1.0})
        group.close()
    assert calls[0]["id"] == calls[1]["id"] and calls[0]["resume"] == "allow"
    assert capsys.readouterr().err.count("no network") == 2
    assert steps(tmp_path / "metrics.jsonl") == [1, 4]
