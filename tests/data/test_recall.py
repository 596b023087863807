"""Tests the rows of delayed recall, what counts in them, and that windows shorter than the delay cannot see the values.

R rows, L tokens in a row, T = L - 1.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import sliding_window
from mesanet_jax import models, schema
from mesanet_jax.data import packing, recall
from mesanet_jax.data.loader import Batches, eval_batches, to_batch
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals import stream
from mesanet_jax.recall import main


def task(**values):
    config = schema.build(recall.SCHEMA)
    config.update({"seq_len": 127, "delay": 60, "pairs": 3, "train_rows": 1500, "validation_rows": 40} | values)
    return config


def made(config, split="train"):
    return np.concatenate(list(recall.rows(config, split)))


def places(rows_R):
    """Returns the position of each answer in its row, [R, pairs]."""
    answers_RL = packing.counted(rows_R)
    return np.nonzero(answers_RL)[1].reshape(len(rows_R), -1)


def test_an_answer_is_the_value_a_delay_before_behind_the_same_key():
    config = task()
    rows_R = made(config)
    tokens_RL, place = rows_R["tokens"], places(rows_R)
    assert len(rows_R) == 1500 and place.shape == (1500, 3)
    take = lambda shift: np.take_along_axis(tokens_RL, place - shift, axis=1)
    np.testing.assert_array_equal(take(0), take(60))
    np.testing.assert_array_equal(take(1), take(61))
    assert np.isin(take(0), recall.VALUES[:16]).all() and np.isin(take(1), recall.KEYS).all()
    assert all(len(set(row)) == 3 for row in take(1))  # a key has one value
    kinds = [np.isin(tokens_RL, symbols).sum() for symbols in (recall.KEYS, recall.VALUES, recall.FILLER)]
    assert kinds == [1500 * 6, 1500 * 6, 1500 * (128 - 12)]
    assert (place.min(), place.max()) == (61, 127)  # the pairs begin anywhere they fit


def test_nothing_but_the_value_tells_the_answer():
    """Answers are uniform and independent of their key, their neighbours and their position."""
    rows_R = made(task(train_rows=20_000, symbols=4))
    place = places(rows_R)
    take = lambda shift: np.take_along_axis(rows_R["tokens"], place - shift, axis=1)
    answer = np.searchsorted(recall.VALUES[:4], take(0))
    contexts = {
        "key": take(1),
        "filler before the pairs": np.broadcast_to(take(2)[:, :1], answer.shape),
        "place": place,
        "order": np.indices(place.shape)[1],
        "another answer": np.roll(answer, 1, axis=1),
    }
    for name, context in contexts.items():
        counts = np.array([np.bincount(answer[context == value], minlength=4) for value in np.unique(context)])
        expected = counts.sum(1, keepdims=True) / 4
        chi2, freedom = ((counts - expected) ** 2 / expected).sum(), 3 * len(counts)
        assert chi2 < freedom + 5 * math.sqrt(2 * freedom), name


def test_rows_depend_on_the_seed_alone():
    assert made(task()).tobytes() == made(task()).tobytes()
    assert made(task()).tobytes() != made(task(seed=1)).tobytes()
    rows_R = made(task(train_rows=3000))
    assert len(np.unique(rows_R["tokens"], axis=0)) == 3000  # no row occurs twice
    both = [made(task(validation_rows=1500), split)["tokens"] for split in ("train", "validation")]
    assert len(np.unique(np.concatenate(both), axis=0)) == 3000


def test_training_rows_may_have_shorter_delays():
    """All delays are equally frequent, and `shortest_delay` does not change the validation rows."""
    config = task(shortest_delay=7, train_rows=5400)
    rows_R = made(config)
    tokens_RL, place = rows_R["tokens"], places(rows_R)
    key_R1 = np.take_along_axis(tokens_RL, place[:, :1] - 1, axis=1)
    delays_R = np.diff(np.nonzero(tokens_RL == key_R1)[1].reshape(-1, 2))[:, 0]
    take = lambda shift: np.take_along_axis(tokens_RL, place - shift, axis=1)
    np.testing.assert_array_equal(take(0), take(delays_R[:, None]))
    counts = np.bincount(delays_R, minlength=61)
    assert not counts[:7].any() and len(counts) == 61 and counts[7:].min() > 50 and counts.max() < 160
    assert ((place - delays_R[:, None]).min(), place.max()) == (1, 127)
    assert made(config, "validation").tobytes() == made(task(), "validation").tobytes()
    longest = task(shortest_delay=60)
    assert made(longest).tobytes() == made(task()).tobytes()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    config = task(output=str(tmp_path_factory.mktemp("recall") / "out"))
    recall.write(config)
    return config


def test_written_rows_are_read_as_prepared_ones(prepared):
    rows = PackedRows(prepared.output, "train")
    assert (len(rows), rows.seq_len, rows.vocab_size) == (1500, 127, 259)
    assert rows.read(range(1500)).tobytes() == made(prepared).tobytes()
    assert rows.tokenizer.decode(rows[3]["tokens"]) == rows.decode(3) == rows.decode(3).strip()
    assert recall.write(prepared)["fingerprint"] == rows.fingerprint  # the second call changes nothing
    with pytest.raises(UserError, match="holds other rows"):
        recall.write(task(output=prepared.output, seed=5))


def test_only_answers_count(prepared):
    rows = PackedRows(prepared.output, "validation")
    [batch] = eval_batches(rows, 64)
    assert batch["weights"].sum() == 40 * 3 and not batch["weights"][40:].any()
    stored = rows.read(range(40))
    answers_RL = packing.counted(stored)
    np.testing.assert_array_equal(batch["weights"][:40] > 0, answers_RL[:, 1:])
    np.testing.assert_array_equal(batch["targets"][batch["weights"] > 0], stored["tokens"][answers_RL])
    assert not batch["segment_ids"].any()
    training = Batches(PackedRows(prepared.output, "train"), 8, seed=0, steps=1)[0]
    assert training["weights"].sum() == 8 * 3
    with pytest.raises(UserError, match="only answers are scored"):
        stream.read(rows)


@pytest.mark.parametrize(("delay", "seen"), [(32, False), (31, True)])
def test_windows_do_not_see_further_than_they_reach(delay, seen):
    """Two layers of 16 tokens reach 30 tokens before the last one, so they do not see values 32 tokens before."""
    config = sliding_window.get_config("smoke")
    config.model.vocab_size = 259
    model = models.build(config.model)
    assert config.model.layers * (config.model.sliding.window - 1) == 30
    rows_R = made(task(seq_len=63, delay=delay, pairs=1, train_rows=8))
    other_R = rows_R.copy()
    place = places(rows_R) - delay
    values = np.take_along_axis(rows_R["tokens"], place, axis=1)
    following = recall.VALUES[(np.searchsorted(recall.VALUES[:16], values) + 1) % 16]
    np.put_along_axis(other_R["tokens"], place, following, axis=1)
    params, loss = jax.jit(model.init)(jax.random.key(0)), jax.jit(model.loss)
    nats, others = (np.asarray(loss(params, jax.tree.map(jnp.asarray, to_batch(rows)))) for rows in (rows_R, other_R))
    assert (nats > 0).sum() == 8
    assert np.array_equal(nats, others) != seen


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"output": ""}, "config.output: is empty"),
        ({"pairs": 27}, "config.pairs=27: must be at most 26"),
        ({"symbols": 40}, "config.symbols=40: must be at most 33"),
        ({"delay": 5}, "config.delay=5: must be at least 6, or the pairs overlap with their repetition"),
        ({"shortest_delay": 5}, "config.shortest_delay=5: must be at least 6"),
        ({"shortest_delay": 61}, "config.shortest_delay=61: must be at most config.delay=60"),
        ({"delay": 123}, "config.seq_len=127: must be at least 128, to hold 3 pairs twice"),
    ],
)
def test_impossible_tasks_are_one_line(values, message):
    with pytest.raises(UserError, match=message):
        recall.check(task(**{"output": "out"} | values))


def test_the_command(tmp_path, capsys):
    values = {"output": tmp_path / "out", "seq_len": 64, "delay": 40, "train_rows": 30, "validation_rows": 5}
    main([f"--config.{name}={value}" for name, value in values.items()])
    said = capsys.readouterr().out
    assert (
        "train: 30 rows of 65 tokens, 4 answers per row" in said
        and "without memory, an answer costs 2.7726 nats" in said
    )
    main(["--help-config"])
    assert "tokens from a value to its answer" in capsys.readouterr().out
    with pytest.raises(UserError, match="did you mean --config.delay"):
        main(["--config.dealy=3"])
