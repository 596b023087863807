"""Data and workdirs in a bucket (gs://) give the same bits as local ones; the tests run their own storage server."""

import importlib.util
import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import evaluate, generate, train
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import workdir as workdir_lib
from mesanet_jax.runtime.workdir import lock
from mesanet_jax.training.checkpoint import Checkpoints
from tests.helpers import bucket as bucket_lib
from tests.helpers.smoke import assert_bitwise
from tests.helpers.tiny_run import prepare_data
from tests.runtime.test_processes import ProcessRuns
from tests.test_train import STEPS, Runs

FILES = {"config.json", "metrics.jsonl", "goodput.json", "loss.png", "tensorboard", "checkpoints"}


@pytest.fixture(scope="module")
def bucket():
    with bucket_lib.serving() as bucket:
        yield bucket


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def remote(bucket, cache, tmp_path_factory):
    """Runs in the bucket, with data prepared there."""
    data = prepare_data(tmp_path_factory.mktemp("texts") / "data", seq_len=64, output=f"{bucket.url}/data")
    return Runs(workdir_lib.path(f"{bucket.url}/runs"), data, cache=cache)


def test_training_in_a_bucket(bucket, cache, tmp_path, tiny_data, capsys):
    """With data and workdir in the bucket, the losses are equal bit by bit, and every file is there."""
    data = prepare_data(tmp_path / "data", seq_len=64, output=f"{bucket.url}/small/data")
    assert PackedRows(data, "train").fingerprint == PackedRows(tiny_data, "train").fingerprint
    losses = []
    for folder, rows in ((tmp_path / "run", tiny_data), (workdir_lib.path(f"{bucket.url}/small/run"), data)):
        argv = [
            f"--workdir={folder}",
            "--config=configs/transformer.py:smoke",
            f"--config.data.path={rows}",
            f"--config.model.vocab_size={PackedRows(rows, 'train').vocab_size}",
            "--config.model.layers=1",
            "--config.steps=4",
            "--config.checkpoint.every=2",
            "--config.checkpoint.keep_last=1",
            "--config.compile_cache=none",
            "--config.train.eval_batches=1",
        ]
        assert train.main(argv) == 0
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([(line["step"], line.get("loss"), line.get("validation_loss")) for line in lines])
        assert {file.name for file in folder.iterdir()} >= FILES
        assert [file.name for file in (folder / "checkpoints").iterdir()] == ["4"]  # the earlier one is deleted
    assert losses[0] == losses[1] and len(losses[0]) == 5
    said = capsys.readouterr()
    assert "warning" not in said.out + said.err


@pytest.mark.slow
def test_a_run_in_a_bucket_is_the_local_one(remote, cache, tmp_path, tiny_data, capsys):
    """It is preempted, resumed, evaluated and sampled from, and every bit, text and number is the same."""
    local = Runs(tmp_path, tiny_data, cache=cache)
    options = {"checkpoint.every": 10, "log.tensorboard": True}
    assert local.run("run", options).status == 0
    stopped = remote.run("run", options, interrupt=remote.signal_after("run", 10, signal.SIGTERM))
    assert stopped.status == 128 + signal.SIGTERM, stopped.both
    done = remote.run("run", options)
    assert done.status == 0 and "resuming after step" in done.both, done.both
    for word in ("Traceback", "warning", "error"):
        assert word not in stopped.both + done.both
    assert len(remote.losses("run")) == 60
    for metric in ("loss", "validation_loss"):
        assert remote.losses("run", metric) == local.losses("run", metric)
    (step, state), (other_step, other_state) = remote.state("run"), local.state("run")
    assert step == other_step == STEPS
    assert_bitwise(state, other_state)

    here, there = (runs.root / "run" for runs in (local, remote))
    assert {file.name for file in there.iterdir()} >= FILES
    assert sum(json.loads((there / "goodput.json").read_text())["seconds"].values()) > 0
    assert len(list((there / "tensorboard").iterdir())) == 2  # of two processes
    texts, scores = [], []
    for folder in (here, there):
        evaluate.main([f"--workdir={folder}", "--config.compile_cache=none"])
        scores.append(json.loads((folder / "evaluation" / f"validation-{STEPS}.json").read_text()))
        del scores[-1]["seconds"], scores[-1]["data"]
        capsys.readouterr()
        generate.main([f"--workdir={folder}", "--config.compile_cache=none", "--prompt=It is", "--max_tokens=20"])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and len(texts[0]) > 5
    assert scores[0] == scores[1]
    assert (there / "evaluation" / f"validation-{STEPS}.png").read_bytes().startswith(b"\x89PNG")


COMMITTED = "slow/checkpoints/1/commit_success.txt"  # marks a checkpoint in a bucket as complete


def test_slow_storage_does_not_delay_training(bucket):
    """`save` returns before a byte of an array is stored; the checkpoint is complete once everything is stored."""
    checkpoints = Checkpoints(workdir_lib.path(f"{bucket.url}/slow"))
    state = {"params": {"w": jnp.arange(1000.0)}, "step": jnp.int32(1)}
    with bucket.hold("ocdbt.process_0/d/"):
        checkpoints.save(1, state, {})
        assert bucket.held.wait(60)
        state = jax.tree.map(lambda leaf: leaf + 1, state)  # training continues meanwhile
        assert COMMITTED not in bucket.objects
    checkpoints.wait()
    assert COMMITTED in bucket.objects
    assert checkpoints.steps() == [1]
    saved = checkpoints.restore(1, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state))
    assert_bitwise(saved["params"]["w"], jnp.arange(1000.0))
    checkpoints.close()


@pytest.mark.slow
def test_an_incomplete_checkpoint_is_ignored(bucket):
    """A process was killed while it saved a step: the previous step is the newest, and the step can be saved again."""
    state = {"params": {"w": jnp.arange(10.0)}, "step": jnp.int32(1)}
    folder = workdir_lib.path(f"{bucket.url}/partial")
    for again in (False, True):
        checkpoints = Checkpoints(folder)
        assert checkpoints.steps() == [1] * again
        for step in (1, 2)[again:]:
            checkpoints.save(step, state, {})
            checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        checkpoints.close()
        bucket.objects.pop("partial/checkpoints/2/commit_success.txt")
    checkpoints = Checkpoints(folder)
    aside = checkpoints.set_aside(1)
    assert checkpoints.steps() == [] and (aside / "commit_success.txt").exists()
    assert not any(name.startswith("partial/checkpoints/1/") for name in bucket.objects)
    checkpoints.close()


def test_errors_of_workdirs_are_one_line(bucket, monkeypatch):
    with pytest.raises(UserError, match="--workdir=s3://b/run: must be a local directory or gs://"):
        workdir_lib.path("s3://b/run")
    missing = workdir_lib.path("gs://misspelt/run")
    with (
        pytest.raises(UserError, match="^--workdir=gs://misspelt/run: there is no such bucket$") as raised,
        lock(missing),
    ):
        pass
    assert "\n" not in str(raised.value)
    with pytest.raises(UserError, match="^--workdir=gs://misspelt/run: contains no run"):
        workdir_lib.load(missing, {})
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"needs the package gcsfs: pip install mesanet-jax\[gcs\]"):
        workdir_lib.path("gs://tests/run")


@pytest.mark.slow
def test_two_processes_in_a_bucket(bucket, cache, tmp_path, tiny_data):
    """They see each other's files; one process with as many devices continues from their checkpoint."""
    remote = ProcessRuns(workdir_lib.path(f"{bucket.url}/processes"), tiny_data, cache=cache)
    group = remote.begin("run", (2, 2), {"checkpoint.every": 4})
    remote.await_step("run", 4, group)
    group.signal(1, signal.SIGTERM)
    assert [end.status for end in group.ended()] == [128 + signal.SIGTERM] * 2
    (done,) = remote.finish("run", (1, 4))
    assert "resuming after step" in done.output and "warning" not in done.output
    local = ProcessRuns(tmp_path, tiny_data, cache=cache)
    local.finish("run", (1, 4))
    losses, wanted = remote.losses("run"), local.losses("run")
    assert losses.keys() == wanted.keys()
    np.testing.assert_allclose(list(losses.values()), list(wanted.values()), rtol=2e-6)
