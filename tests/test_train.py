"""Training as users do it: commands, signals, repeated commands, and their messages.

A step takes about 50 ms, and the runs that are interrupted have 60 steps, so a signal always arrives during training.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models, schema, train
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import workdir
from mesanet_jax.training import checkpoint as checkpoint_lib
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.resume import initial_state
from tests.helpers.smoke import ROOT, assert_bitwise
from tests.helpers.tiny_run import prepare_data

STEPS = 60


class Runs:
    """Starts `mesanet_jax.train` on the tiny data; all runs share a cache of compiled programs."""

    def __init__(self, root, data: str, *, cache=None):
        self.root, self.data = root, data
        self._defaults = {
            "data.path": data,
            "model.vocab_size": PackedRows(data, "train").vocab_size,
            "steps": STEPS,
            "checkpoint.every": 25,
            "checkpoint.keep_last": 2,
            "train.eval_batches": 2,
            "log.tensorboard": False,
            "compile_cache": cache or root / "cache",
        }

    def argv(self, name: str, overrides: dict) -> list[str]:
        flags = [f"--config.{path}={value}" for path, value in (self._defaults | overrides).items()]
        return ["--config=configs/mesanet.py:smoke", f"--workdir={self.root / name}", *flags]

    def start(self, name: str, overrides: dict) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "mesanet_jax.train", *self.argv(name, overrides)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"},
        )  # fmt: skip

    def run(self, name: str, overrides: dict | None = None, *, interrupt=None):
        """Runs until the end, or until `interrupt(process)` ends it; returns the status, the output and the errors."""
        process = self.start(name, overrides or {})
        if interrupt is not None:
            interrupt(process)
        output, errors = process.communicate(timeout=300)
        return SimpleNamespace(status=process.returncode, output=output, errors=errors, both=output + errors)

    def signal_after(self, name: str, step: int, number: int, *, delay: float = 0.0):
        """Returns an `interrupt` that sends a signal once the metrics of `step` are written."""

        def interrupt(process):
            while process.poll() is None and max(self.losses(name), default=0) < step:
                time.sleep(0.01)
            time.sleep(delay)
            assert process.poll() is None, "the run ended before the signal"
            process.send_signal(number)

        return interrupt

    def records(self, name: str) -> list[dict]:
        path = self.root / name / "metrics.jsonl"
        records = []
        with contextlib.suppress(json.JSONDecodeError):  # a line that is being written
            records.extend(map(json.loads, path.read_text().splitlines() if path.exists() else ()))
        return records

    def losses(self, name: str, metric: str = "loss") -> dict[int, float]:
        records = [record for record in self.records(name) if metric in record]
        losses = {record["step"]: record[metric] for record in records}
        assert len(losses) == len(records), "a step was logged twice"
        return losses

    def steps(self, name: str) -> list[int]:
        folder = self.root / name / checkpoint_lib.DIRECTORY
        return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())

    def state(self, name: str):
        """Returns (step, state) of the newest checkpoint, restored on one device."""
        config = workdir.load(self.root / name, {})
        model, mesh = models.build(config.model), mesh_lib.make_mesh((1, 1, 1), jax.devices()[:1])
        program = step_lib.compile_program(config, model, mesh)
        saved = checkpoint_lib.Checkpoints(self.root / name)
        step = saved.steps()[-1]
        state = jax.device_get(saved.restore(step, program.state))
        saved.close()
        return step, state


@pytest.fixture(scope="module")
def runs(tmp_path_factory, tiny_data):
    return Runs(tmp_path_factory.mktemp("runs"), tiny_data)


@pytest.fixture(scope="module")
def whole(runs):
    """The name of a run that was not interrupted."""
    done = runs.run("whole")
    assert done.status == 0, done.both
    assert f"holds all {STEPS} steps" in done.both and "Traceback" not in done.both
    return "whole"


def test_the_files_of_a_run(runs, whole):
    folder = runs.root / whole
    assert runs.steps(whole) == [50, 60]
    losses = runs.losses(whole)
    assert list(losses) == list(range(1, STEPS + 1)) and losses[STEPS] < losses[1] - 1
    assert list(runs.losses(whole, "validation_loss")) == [STEPS]
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    saved = schema.read_json(folder / "config.json")
    assert saved["steps"] == STEPS and saved["data.path"] == runs.data


def assert_same_run(runs, one, other):
    """Compares the parameters, the optimizer state and every logged loss bit by bit."""
    (step, state), (other_step, other_state) = runs.state(one), runs.state(other)
    assert step == other_step
    assert_bitwise(state, other_state)
    assert runs.losses(one) == runs.losses(other)
    assert runs.losses(one, "validation_loss") == runs.losses(other, "validation_loss")


def test_signals_and_resuming(runs, whole):
    """A run that is stopped by SIGTERM and Ctrl-C and resumed equals the run that was not interrupted."""
    name, begun = "signals", 0
    for number in (signal.SIGTERM, signal.SIGINT):
        done = runs.run(name, interrupt=runs.signal_after(name, begun + 5, number))
        assert done.status == 128 + number, done.both
        stopped = runs.steps(name)[-1]
        assert begun < stopped < STEPS and f"step {stopped} is saved" in done.both
        assert (f"resuming after step {begun}" in done.both) == (begun > 0)
        assert "Traceback" not in done.both
        begun = stopped
    done = runs.run(name)
    assert done.status == 0 and f"resuming after step {begun}" in done.both, done.both
    assert_same_run(runs, name, whole)


@pytest.mark.slow
def test_killed_while_saving(runs, whole):
    """Every step is saved, so that SIGKILL arrives during a save; the checkpoints that remain are complete."""
    name, options, chance = "killed", {"checkpoint.every": 1}, random.Random(0)
    for kill in range(3):
        begun = max(runs.losses(name), default=0)
        kill = runs.signal_after(name, begun + 4, signal.SIGKILL, delay=chance.random() / 10)
        assert runs.run(name, options, interrupt=kill).status == -signal.SIGKILL
    done = runs.run(name, options)
    assert done.status == 0 and "resuming after step" in done.both, done.both
    assert_same_run(runs, name, whole)


def test_signal_before_the_first_step(runs):
    """There is nothing to save while the first step compiles, so the run ends at once and says so."""

    def interrupt(process):
        assert process.stdout.readline()  # the banner: the first step is about to be compiled
        process.send_signal(signal.SIGTERM)

    done = runs.run("early", {"model.mesa.max_iters": 29}, interrupt=interrupt)  # not in the cache
    assert done.status == 128 + signal.SIGTERM
    assert "SIGTERM: stopping now" in done.errors and "Traceback" not in done.errors


def test_finished_run_says_so(runs, whole):
    before, records = runs.state(whole), runs.records(whole)
    done = runs.run(whole, {"name": "renamed"})
    assert done.status == 0 and f"holds all {STEPS} steps" in done.both
    assert "changed since this run began: config.name: mesanet-smoke in the workdir, renamed now" in done.both, (
        done.both
    )
    assert_bitwise(runs.state(whole)[1], before[1])
    assert runs.records(whole) == records


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [("data.seed", 0, 5), ("seed", 0, 5), ("data.batch_size", 8, 4), ("optimizer.learning_rate", 0.005, 0.001),
     ("model.mesa.conv_width", 4, 3), ("steps", STEPS, 70)],
)  # fmt: skip
def test_another_run_is_refused(runs, whole, path, before, after):
    saved = (runs.root / whole / "config.json").read_text()
    with pytest.raises(UserError, match="holds another run") as raised:
        train.main(runs.argv(whole, {path: after}))
    assert f"config.{path}: {before} in the workdir, {after} now" in str(raised.value)
    assert (runs.root / whole / "config.json").read_text() == saved


def test_other_data_are_refused(runs, whole, tmp_path):
    """Row length and vocabulary are the same, but not the fingerprint; the workdir does not change."""
    saved = (runs.root / whole / "config.json").read_text()
    other = prepare_data(tmp_path / "other", seq_len=64, eos=True)
    done = runs.run(whole, {"data.path": other})
    assert done.status == 2 and done.errors.count("\n") == 1, done.both
    for data in (runs.data, other):
        assert PackedRows(data, "train").fingerprint in done.errors
    assert (runs.root / whole / "config.json").read_text() == saved


def test_data_that_do_not_fit(runs, tmp_path):
    rows = PackedRows(runs.data, "train")
    for overrides, message in (
        ({"data.path": tmp_path}, f"{tmp_path}/manifest.json: missing"),
        ({"data.path": ""}, "config.data.path"),
        ({"data.split": "test"}, "no split 'test'"),
        ({"data.seq_len": 32}, f"config.data.seq_len=32, but {runs.data} was prepared with 64"),
        (
            {"model.vocab_size": 512},
            f"config.model.vocab_size=512, but {runs.data} was prepared with {rows.vocab_size}",
        ),
    ):
        with pytest.raises(UserError) as raised:
            train.main(runs.argv("none", overrides))
        assert message in str(raised.value) and "\n" not in str(raised.value)
    assert not (runs.root / "none").exists()


def test_update_that_is_not_finite(runs):
    """The run stops with status 1 after a good checkpoint; with `skip`, it can be resumed and reaches the end.

    The warm-up makes the first update small. The second would overflow the norm of the parameters although its loss is
    finite.
    """
    name, options = "nonfinite", {"optimizer.learning_rate": 1e30, "checkpoint.every": 1, "steps": 8}
    stopped = runs.run(name, options)
    assert stopped.status == 1, stopped.both
    assert "step 2: " in stopped.errors and "the last checkpoint is good" in stopped.errors
    assert "Traceback" not in stopped.errors
    step, state = runs.state(name)
    assert step == 1 and all(np.linalg.norm(leaf) < 100 for leaf in jax.tree.leaves(state["params"]))

    limited = runs.run(name, options | {"train.nonfinite": "skip", "train.max_skips": 2})
    assert limited.status == 1 and "step 4: " in limited.errors and "for 3 step(s) in a row" in limited.errors, (
        limited.both
    )
    skipping = runs.run(name, options | {"train.nonfinite": "skip", "train.max_skips": 100})
    assert skipping.status == 0 and "step 8: not finite, update skipped" in skipping.both, skipping.both
    step, after = runs.state(name)
    assert step == 8
    assert_bitwise(after["params"], state["params"])
    assert np.isfinite(runs.records(name)[-1]["validation_loss"])


def test_init_from_takes_the_weights_alone(runs, whole, tmp_path):
    config = workdir.load(runs.root / whole, {"checkpoint.init_from": str(runs.root / whole)})
    model, mesh = models.build(config.model), mesh_lib.make_mesh((1, 1, 1), jax.devices()[:1])
    program = step_lib.compile_program(config, model, mesh)
    saved = checkpoint_lib.Checkpoints(tmp_path)
    state, start = initial_state(config, program, model, saved, {"data": "another fingerprint"})
    saved.close()
    assert start == 0 and int(state["step"]) == 0
    assert_bitwise(jax.device_get(state["params"]), runs.state(whole)[1]["params"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state["opt_state"]))


def test_one_process_a_workdir(runs):
    held = runs.root / "held"
    with workdir.lock(held), pytest.raises(UserError, match=f"process {os.getpid()} on .* is training here"):
        train.main(runs.argv("held", {}))
    with workdir.lock(held):  # it was released with its holder
        pass
