"""Tests evaluation against its definitions, and the command from a workdir to its files."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import evaluate, models
from mesanet_jax.data.loader import eval_batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals.perplexity import evaluate_rows, position_buckets
from mesanet_jax.training.data import check_tokenizer
from tests.helpers.tiny_run import prepare_data, save_run

TOKEN_BYTES = np.array([0, 1, 2, 3])  # id 0 is special


def batch(targets, weights):
    targets = np.array(targets, np.int32)
    return {"inputs": targets, "targets": targets, "segment_ids": 0 * targets, "weights": np.array(weights, np.float32)}


def constant_loss(nats):
    """Returns a scoring function with the given nats, times the weights."""
    return lambda params, batch: (np.array(nats, np.float32) * batch["weights"], {}, {})


def test_bits_per_byte_by_hand():
    """Tokens of 2 and 3 bytes cost 1 and 4 nats. Only the loss counts the 7 nats of a special token."""
    rows = batch([[2, 3, 0, 1]], [[1, 1, 1, 0]])
    result = evaluate_rows(constant_loss([[1.0, 4.0, 7.0, 100.0]]), None, [rows], TOKEN_BYTES)
    assert result.loss == 12 / 3
    assert result.perplexity == math.exp(4)
    assert result.bits_per_byte == pytest.approx((1 + 4) / (math.log(2) * (2 + 3)), rel=1e-15)
    assert (result.tokens, result.bytes) == (3, 5)
    np.testing.assert_array_equal(result.position_tokens_T, [1, 1, 1, 0])
    np.testing.assert_array_equal(result.position_loss_T, [1.0, 4.0, 7.0, np.nan])


def test_ragged_batches_weigh_by_tokens():
    """One token of 1 nat and three of 2 nats have the mean 7/4; a mean of means would be 1.5."""
    nats = iter(([[1.0, 9.0, 9.0]], [[2.0, 2.0, 2.0]]))
    scores_fn = lambda params, batch: (np.array(next(nats), np.float32) * batch["weights"], {}, {})
    batches = [batch([[1, 1, 1]], [[1, 0, 0]]), batch([[1, 1, 1]], [[1, 1, 1]])]
    assert evaluate_rows(scores_fn, None, batches, TOKEN_BYTES).loss == 7 / 4


def test_other_modes_are_scored_on_the_same_tokens():
    """Two ways to compute the loss and a count of the computation: the same weights, and the gap between the two."""
    counts = iter((4, 7))
    one, other = np.array([[1.0, 4.0]]), np.array([[0.5, 3.0]])
    scores_fn = lambda params, batch: (
        one * batch["weights"],
        {"lifted": other * batch["weights"]},
        {"sweeps": next(counts)},
    )
    rows = [batch([[2, 3]], [[1, 1]]), batch([[2, 0]], [[1, 1]])]
    result = evaluate_rows(scores_fn, None, rows, TOKEN_BYTES)
    assert (result.loss, result.others["lifted"].loss) == (2.5, 1.75)
    scalars = result.scalars()
    assert scalars["validation_gap_lifted"] == -0.75 and scalars["validation_sweeps"] == 5.5
    assert scalars["validation_bits_per_byte_lifted"] == pytest.approx(4.0 / (math.log(2) * 7), rel=1e-12)


def test_p_correct_over_half_counts_tokens_with_more_than_half_of_the_probability():
    """Two of three valid tokens are likelier than 1/2; a masked one, whose nats are 0, counts in neither number."""
    rows = batch([[1, 2, 3, 1]], [[1, 1, 1, 0]])
    result = evaluate_rows(constant_loss([[0.69, 0.70, 0.0, 0.0]]), None, [rows], TOKEN_BYTES)
    assert result.p_correct_over_half == pytest.approx(2 / 3)


def test_no_bytes_and_no_tokens():
    result = evaluate_rows(constant_loss([[3.0]]), None, [batch([[0]], [[1]])], TOKEN_BYTES)
    assert result.bits_per_byte is None and "validation_bits_per_byte" not in result.scalars()
    for batches in ([], [batch([[1]], [[0]])]):
        with pytest.raises(UserError, match="no row holds a token to score"):
            evaluate_rows(constant_loss([[3.0]]), None, batches, TOKEN_BYTES)


def test_sums_are_float64():
    """20,000 batches of 0.1: a float32 sum would be off in the fourth digit."""
    rows = batch([[1]], [[1]])
    result = evaluate_rows(constant_loss([[0.1]]), None, [rows] * 20_000, TOKEN_BYTES)
    assert result.loss == pytest.approx(np.float64(np.float32(0.1)), rel=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13])
def test_buckets_are_powers_of_two_and_hold_every_token(length):
    rng = np.random.default_rng(length)
    nats, weights = rng.random((4, length)), rng.integers(0, 2, (4, length))
    weights[0] = 1
    result = evaluate_rows(constant_loss(nats), None, [batch(np.ones((4, length)), weights)], TOKEN_BYTES)
    buckets = position_buckets(result)
    names = ["1", "2", "3-4", "5-8", "9-13"] if length == 13 else None
    assert names is None or [name for name, *_ in buckets] == names
    assert sum(tokens for *_, tokens in buckets) == result.tokens
    assert sum(loss * tokens for _, loss, tokens in buckets) == pytest.approx(result.loss * result.tokens)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns (workdir, config, params) of a Mesa run."""
    root = tmp_path_factory.mktemp("evaluate")
    data = prepare_data(root / "data", seq_len=32)
    return root / "run", *save_run(root / "run", data, mixer="mesa")


def test_equals_a_direct_computation(run):
    """Compares the command with the cross-entropy in NumPy from the model's logits, row by row."""
    workdir, config, params = run
    rows = PackedRows(config.data.path, "validation")
    model = models.build(config.model)

    @jax.jit
    def logits(params, batch):
        bound = model.bind(params)
        return bound.logits(bound.hidden(batch["inputs"], batch["segment_ids"]))

    nats, tokens, size = 0.0, 0, 0
    for one in eval_batches(rows, 1):
        scores_TV = np.asarray(logits(params, {name: jnp.asarray(x) for name, x in one.items()})[0], np.float64)
        log_probs_TV = scores_TV - np.log(np.exp(scores_TV).sum(axis=-1, keepdims=True))
        valid_T = one["weights"][0] > 0
        nats -= log_probs_TV[np.arange(len(valid_T)), one["targets"][0]][valid_T].sum()
        tokens += valid_T.sum()
        size += (one["targets"][0][valid_T] < 256).sum()
    result = evaluate.evaluate(config, workdir, split="validation", step=None, batches=None).evaluation
    assert result.loss == pytest.approx(nats / tokens, rel=2e-6)
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=2e-6)
    assert (result.tokens, result.bytes) == (tokens, size)


def test_batch_size_does_not_matter(run):
    workdir, config, _ = run
    config, results = config.copy_and_resolve_references(), []
    for rows in (8, 24):
        config.data.batch_size = config.train.rows_per_device = rows
        results.append(evaluate.evaluate(config, workdir, split="validation", step=None, batches=None).evaluation)
    one, other = results
    assert (one.tokens, one.bytes) == (other.tokens, other.bytes)
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    np.testing.assert_allclose(one.position_loss_T, other.position_loss_T, rtol=1e-5)


def test_command_writes_table_json_and_plot(run, capsys):
    workdir, _, _ = run
    evaluate.main([f"--workdir={workdir}", "--step=4", "--split=train", "--batches=2"])
    printed = capsys.readouterr().out
    stem = workdir / "evaluation" / "train-4"
    record = json.loads(stem.with_suffix(".json").read_text())
    assert f"{record['loss']:.4f}" in printed and "| 17-32 " in printed
    assert record["step"] == 4 and len(record["position_loss"]) == 32 == record["seq_len"]
    assert stem.with_suffix(".md").read_text() in printed
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_longer_rows_measure_extrapolation(run, tmp_path, capsys):
    workdir, _, _ = run
    data = prepare_data(tmp_path / "long", seq_len=64)
    evaluate.main([f"--workdir={workdir}", f"--config.data.path={data}"])
    assert "64 (trained on 32: extrapolation)" in capsys.readouterr().out


def test_mistakes_are_one_line(run, tmp_path):
    workdir, _, _ = run
    cases = {
        (f"--workdir={tmp_path}",): "no run",
        (f"--workdir={workdir}", "--step=5"): r"step 5; there are \[4, 8\]",
        (f"--workdir={workdir}", "--split=test"): "no split 'test'",
        (f"--workdir={workdir}", "--batches=0"): "--batches=0",
        (f"--workdir={workdir}", f"--config.data.path={tmp_path}"): "manifest",
    }
    for argv, message in cases.items():
        with pytest.raises(UserError, match=message) as raised:
            evaluate.main(list(argv))
        assert "\n" not in str(raised.value)


def test_another_tokenizer_is_refused(run, monkeypatch):
    workdir, config, _ = run
    rows = PackedRows(config.data.path, "train")
    monkeypatch.setattr(type(rows.tokenizer), "hash", "another")
    with pytest.raises(UserError, match="tokenizer"):
        check_tokenizer(rows, workdir, step=8)
