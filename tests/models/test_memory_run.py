"""A Maglev run from training to text: both losses are logged, printed and written, and P alone generates."""

import json

import pytest
from etils import epath

from mesanet_jax import evaluate, generate, train
from mesanet_jax.comparing import report, results
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.reporting.trackers import read_json_lines
from mesanet_jax.runtime import workdir


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_data):
    """The workdir of a run of three updates."""
    workdir = tmp_path_factory.mktemp("maglev") / "run"
    argv = [
        "--config=configs/maglev.py:smoke", f"--workdir={workdir}", f"--config.data.path={tiny_data}",
        "--config.steps=3", f"--config.model.vocab_size={PackedRows(tiny_data, 'train').vocab_size}",
        "--config.model.layers=2", "--config.optimizer.warmup_steps=0", "--config.train.eval_batches=1",
        "--config.log.tensorboard=false",
    ]  # fmt: skip
    assert train.main(argv) == 0
    return workdir


def test_training_logs_both_losses_and_every_term(run):
    records = read_json_lines(run / "metrics.jsonl")
    steps = [record for record in records if "loss" in record]
    assert len(steps) == 3
    for record in steps:
        assert record["loss"] == pytest.approx(record["cross_entropy"] + 0.1 * record["consistency"], rel=1e-5)
    (validation,) = (record for record in records if "validation_loss" in record)
    gap = validation["validation_loss_lifted"] - validation["validation_loss"]
    assert validation["validation_gap_lifted"] == pytest.approx(gap) and validation["validation_sweeps"] >= 2
    assert "validation_bits_per_byte_lifted" in validation
    assert (run / "terms.png").read_bytes().startswith(b"\x89PNG")


def test_evaluation_prints_both_and_sweeps_are_exact(run, capsys):
    evaluate.main([f"--workdir={run}", "--batches=1", "--config.model.sweep_tolerance=0"])
    printed = capsys.readouterr().out
    for row in (
        "| loss (nats / token) ",
        "| loss, lifted ",
        "| gap, lifted less decoding ",
        "| sweeps (mean over batches) ",
    ):
        assert row in printed
    (file,) = (run / "evaluation").glob("*.json")
    swept = json.loads(file.read_text())
    assert f"{swept['loss']:.4f}" in printed and f"{swept['modes']['lifted']['loss']:.4f}" in printed
    assert swept["computation"]["sweeps"] >= 2
    result = results.read(workdir.load(epath.Path(run), {}), epath.Path(run))
    assert (
        result.evaluation.loss == swept["loss"] and result.modes["lifted"]["loss"] == swept["modes"]["lifted"]["loss"]
    )
    assert "| maglev-smoke | lifted |" in report.ComparisonReport([result], failed={}).markdown()
    evaluate.main([f"--workdir={run}", "--batches=1", "--config.model.deployed_by=steps"])
    stepped = json.loads(file.read_text())
    assert stepped["loss"] == pytest.approx(swept["loss"], rel=1e-5) and stepped["computation"] == {}


def test_generation(run, capsys):
    generate.main([f"--workdir={run}", "--prompt=Document 1: the", "--max_tokens=5", "--temperature=0"])
    output = capsys.readouterr()
    assert output.out.startswith("Document 1: the") and "bytes per sequence" in output.err
