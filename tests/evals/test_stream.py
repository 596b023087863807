"""Tests the stream protocol: every token is scored once with the promised context; and tests its command.

Shape suffixes: N tokens of the stream, B windows, T inputs of a window, V vocabulary.
"""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import prepare as prepare_configs
from mesanet_jax import evaluate, models, prepare
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.evals import stream
from mesanet_jax.evals.perplexity import evaluate_rows
from mesanet_jax.evals.stream import Windows
from tests.helpers.tiny_run import save_run

LINES = [" = Heading = \n", "\n", *(f" The {i} of words @-@ counted , naïvely . \n" for i in range(30)), "\n"]


def scored(tokens_N, starts_N, windows, *, batch_size=3):
    """Returns {position of a target: positions of the inputs that predict it}; checks that each is scored once."""
    found = {}
    for batch in stream.batches(tokens_N, starts_N, windows, batch_size=batch_size):
        assert {x.shape for x in batch.values()} == {(batch_size, windows.context)}
        for row, time in zip(*np.nonzero(batch["weights"])):
            segment_T = batch["segment_ids"][row, : time + 1]
            inputs_T = batch["inputs"][row, : time + 1][segment_T == segment_T[-1]]
            target = int(batch["targets"][row, time])
            assert target not in found
            found[target] = inputs_T.tolist()
    return found


@pytest.mark.parametrize("context, stride", [(8, 8), (8, 3), (8, 1), (7, 4), (64, 16), (1, 1)])
@pytest.mark.parametrize("length", [2, 8, 9, 10, 31])
def test_every_token_once_with_its_context(length, context, stride):
    """Each token is its own position, so that the inputs of a window show what predicts a target."""
    starts_N = np.arange(length) == 0
    found = scored(np.arange(length), starts_N, Windows(context, stride))
    assert sorted(found) == list(range(1, length))
    for target, inputs in found.items():
        assert inputs == list(range(target - len(inputs), target))  # the text directly before it
        least = min(target, context - stride + 1)
        assert least <= len(inputs) <= context


def test_documents_are_kept_apart():
    starts_N = np.isin(np.arange(20), [0, 5, 6, 15])
    found = scored(np.arange(20), starts_N, Windows(8, 4))
    assert sorted(found) == [place for place in range(20) if not starts_N[place]]
    begin = lambda place: max(start for start in (0, 5, 6, 15) if start <= place)
    assert all(inputs[0] >= begin(target) for target, inputs in found.items())


@pytest.mark.parametrize("context, stride", [(8, 0), (8, 9)])
def test_impossible_windows(context, stride):
    with pytest.raises(UserError, match=f"--stride={stride}: must be at least 1 and at most --context=8"):
        Windows(context, stride)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns (workdir, config, params) of an attention model whose data are joined as for WikiText."""
    root = tmp_path_factory.mktemp("stream")
    for split in ("train", "validation"):
        (root / f"{split}.txt").write_text("".join(LINES))
    config = prepare_configs.get_config("wikitext")
    config.input, config.validation_input = str(root / "train.txt"), str(root / "validation.txt")
    config.output, config.format, config.seq_len, config.workers = str(root / "data"), "text", 32, 1
    config.tokenizer.kind = "bytes"
    prepare.prepare(config)
    return root / "run", *save_run(root / "run", config.output, mixer="attention")


def test_the_stream_is_the_text(run):
    rows = PackedRows(run[1].data.path, "validation")
    tokens_N, starts_N = stream.read(rows)
    assert tokens_N[0] == rows.tokenizer.bos_id and np.flatnonzero(starts_N).tolist() == [0]
    assert rows.tokenizer.decode(tokens_N) == "".join(LINES)
    assert rows.words == sum(len(line.split()) + 1 for line in LINES)


@pytest.fixture(scope="module")
def log_probs(run):
    """Returns a function from tokens [T] to log-probabilities [T, V] that uses decoding, not the tested code."""
    _, config, params = run
    model = models.build(config.model)

    @jax.jit
    def call(tokens_T):
        state = model.init_state(params, 1, max_length=tokens_T.shape[0])
        return jax.nn.log_softmax(model.extend(params, tokens_T[None], state)[0][0])

    return call


@pytest.mark.parametrize("stride", [16, 24])
def test_equals_a_direct_computation(run, log_probs, stride):
    """Adds up the new targets of each window in NumPy."""
    workdir, config, _ = run
    rows, context = PackedRows(config.data.path, "validation"), 24
    tokens_N, _ = stream.read(rows)
    nats, done = 0.0, 0
    for begin in range(0, len(tokens_N), stride):
        inputs_T = tokens_N[begin : begin + context]
        padded_T = np.pad(inputs_T, (0, context - len(inputs_T)))
        scores_TV = np.asarray(log_probs(jnp.asarray(padded_T, jnp.int32)), np.float64)
        for place in range(done + 1, min(begin + context, len(tokens_N) - 1) + 1):
            nats -= scores_TV[place - 1 - begin, tokens_N[place]]
            done = place
    assert done == len(tokens_N) - 1
    report = evaluate.evaluate(
        config, workdir, split="validation", step=None, batches=None, windows=Windows(context, stride)
    )
    assert report.evaluation.tokens == done
    assert report.evaluation.loss == pytest.approx(nats / done, rel=2e-6)
    assert report.evaluation.bits_per_byte == pytest.approx(
        nats / math.log(2) / rows.manifest["splits"]["validation"]["text_bytes"], rel=2e-6
    )
    assert report.word_perplexity == pytest.approx(math.exp(nats / rows.words), rel=1e-5)


def test_a_stride_of_the_context_is_the_evaluation_of_blocks(run):
    """Disjoint blocks of the stream, evaluated as rows, give the same loss."""
    _, config, params = run
    rows = PackedRows(config.data.path, "validation")
    tokens_N, starts_N = stream.read(rows)
    model, size = models.build(config.model), rows.tokenizer.token_bytes()
    scores = jax.jit(model.scores)
    count = (len(tokens_N) - 1) // 32
    blocks_BL = np.stack([tokens_N[32 * index : 32 * index + 33] for index in range(count)]).astype(np.int32)
    plain = {
        "inputs": blocks_BL[:, :-1], "targets": blocks_BL[:, 1:],
        "segment_ids": np.zeros((count, 32), np.int32), "weights": np.ones((count, 32), np.float32),
    }  # fmt: skip
    whole = slice(0, 32 * count + 1)
    windows = stream.batches(tokens_N[whole], starts_N[whole], Windows(32, 32), batch_size=4)
    one, other = evaluate_rows(scores, params, [plain], size), evaluate_rows(scores, params, windows, size)
    assert (one.tokens, one.bytes) == (other.tokens, other.bytes)
    assert one.loss == pytest.approx(other.loss, rel=1e-6)


def test_command(run, capsys):
    """The results go to a file of their own, which names the protocol."""
    workdir, config, _ = run
    evaluate.main([f"--workdir={workdir}", "--protocol=stream", "--context=24", "--stride=16"])
    printed = capsys.readouterr().out
    record = json.loads((workdir / "evaluation" / "validation-8-stream-24-16.json").read_text())
    assert record["protocol"] == "stream, context 24, stride 16" and record["protocol"] in printed
    assert f"{record['word_perplexity']:.2f}" in printed and f"{record['words']:,}" in printed
    evaluate.main([f"--workdir={workdir}", "--protocol=stream", "--context=24", "--stride=24", "--batches=1"])
    assert (
        json.loads((workdir / "evaluation" / "validation-8-stream-24-24.json").read_text())["word_perplexity"] is None
    )


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--protocol=strem"], "--protocol=strem: choose one of rows, stream"),
        (["--context=8"], "--context: applies only to --protocol=stream"),
        (["--protocol=stream", "--stride=64"], "--stride=64: must be at least 1 and at most --context=32"),
    ],
)
def test_mistakes(run, flags, message):
    with pytest.raises(UserError, match=message):
        evaluate.main([f"--workdir={run[0]}", *flags])
