"""Sampling: the distributions it draws from, what it must not depend on, and the text that it prints."""

import io
import itertools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import generate, models
from mesanet_jax.data.tokenizer import Bytes
from mesanet_jax.errors import UserError
from mesanet_jax.inference.sampling import Sampler, Sampling, StreamDecoder, chunk_sizes, state_bytes, truncate
from tests.helpers.tiny_run import CONFIGS, prepare_data, save_run

MIXERS = ("mesa", "attention")


# ---- the distribution


def kept(logits, **options):
    return np.isfinite(np.asarray(truncate(jnp.asarray(logits, jnp.float32), **options)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_k", [1, 3, 50])
def test_top_k_keeps_the_k_likeliest(seed, top_k):
    logits_BV = np.random.default_rng(seed).permuted(np.arange(100.0).reshape(2, 50), axis=1)
    kept_BV = kept(logits_BV, top_k=top_k, top_p=1.0)
    assert (kept_BV.sum(axis=1) == top_k).all()
    assert (kept_BV == (logits_BV >= np.sort(logits_BV, axis=1)[:, -top_k, None])).all()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.9, 0.9999])
def test_top_p_keeps_the_fewest_with_that_probability(seed, top_p):
    logits_BV = np.random.default_rng(seed).normal(size=(2, 50)) * 3
    probs_BV = np.exp(logits_BV) / np.exp(logits_BV).sum(axis=1, keepdims=True)
    for probs_V, kept_V in zip(probs_BV, kept(logits_BV, top_k=0, top_p=top_p), strict=True):
        inside = np.sort(probs_V[kept_V])
        assert inside.sum() >= top_p - 1e-6  # enough
        assert inside[1:].sum() < top_p  # without the least likely of them it would not be
        assert probs_V[~kept_V].max(initial=0) < inside[0]


def test_top_p_is_of_the_top_k():
    """Of (0.5, 0.3, 0.2) the first two have 0.8; renormalised, the first alone has 0.625 >= 0.6."""
    logits = np.log([[0.5, 0.3, 0.2]])
    assert kept(logits, top_k=2, top_p=0.6).tolist() == [[True, False, False]]
    assert kept(logits, top_k=0, top_p=0.6).tolist() == [[True, True, False]]


def test_temperature_scales_the_logits():
    """Frequencies of 20,000 draws against softmax(logits / 2), within four standard deviations."""
    logits_V, draws = jnp.array([0.0, 1.0, 2.0, 3.0]), 20_000
    tokens_B = Sampling(temperature=2.0).draw(jnp.tile(logits_V, (draws, 1)), jax.random.key(0))
    expected_V = np.asarray(jax.nn.softmax(logits_V / 2.0))
    counts_V = np.bincount(tokens_B, minlength=4)
    assert (abs(counts_V / draws - expected_V) < 4 * np.sqrt(expected_V * (1 - expected_V) / draws)).all()


def test_greedy_is_argmax_whatever_the_key():
    logits_BV = jnp.array([[0.0, 3.0, 1.0], [2.0, 0.0, 1.0]])
    for seed in range(3):
        assert Sampling(temperature=0.0).draw(logits_BV, jax.random.key(seed)).tolist() == [1, 0]


@pytest.mark.parametrize(
    "options",
    [{"temperature": -0.1}, {"temperature": float("nan")}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.01}],
)
def test_impossible_values_are_refused(options):
    with pytest.raises(UserError, match=next(iter(options))):
        Sampling(**options)


# ---- decoding


@pytest.mark.parametrize("chunk", [1, 3, 64, 256])
def test_chunks_cover_the_prompt_with_few_shapes(chunk):
    shapes = set()
    for length in range(1, 600):
        sizes = chunk_sizes(length, chunk)
        assert sum(sizes) == length
        shapes |= set(sizes)
    assert len(shapes) <= 1 + np.log2(chunk) + 1


@pytest.fixture(scope="module")
def built():
    """{mixer: (sampler, params)} of untrained models; one sampler each, so that the tests share what it compiles."""

    def make(mixer):
        config = CONFIGS[mixer].get_config("smoke").model
        config.vocab_size = 259  # padded to 384
        model = models.build(config)
        return Sampler(model), jax.jit(model.init)(jax.random.key(1))

    return {mixer: make(mixer) for mixer in MIXERS}


PROMPT = np.random.default_rng(0).integers(0, 256, 67).tolist()
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=1.0)


def continuation(sampler, params, *, chunk=64, sampling=GREEDY, seed=0, count=12):
    logits_BV, state = sampler.prefill(params, PROMPT, max_length=len(PROMPT) + 100, chunk=chunk)
    tokens = sampler.tokens(params, logits_BV, state, key=jax.random.key(seed), sampling=sampling)
    return list(itertools.islice(tokens, count))


@pytest.mark.parametrize("mixer", MIXERS)
def test_prefill_chunk_does_not_matter(built, mixer):
    texts = [continuation(*built[mixer], chunk=chunk) for chunk in (1, 3, 64)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_equals_rereading_everything(built, mixer):
    """Each token is the likeliest after the whole text so far, read by the training form."""
    sampler, params = built[mixer]
    text = PROMPT + continuation(sampler, params)

    @jax.jit
    def likeliest(params, tokens_BT):
        bound = sampler.model.bind(params)
        return jnp.argmax(bound.logits(bound.hidden(tokens_BT, jnp.zeros_like(tokens_BT))), axis=-1)

    predicted = likeliest(params, jnp.array([text], jnp.int32))[0]
    assert predicted[len(PROMPT) - 1 : -1].tolist() == text[len(PROMPT) :]


def test_padding_of_the_vocabulary_is_never_drawn(built):
    tokens = continuation(*built["mesa"], count=100, sampling=Sampling(temperature=50.0))
    assert 200 < max(tokens) < 259  # so hot that a padded row would come up, a third of 384 being padding


def test_seed_decides(built):
    draw = lambda seed: continuation(*built["mesa"], sampling=WARM, seed=seed)
    assert draw(0) == draw(0) != draw(1)


def test_tokens_leave_the_prefilled_state_alone(built):
    sampler, params = built["mesa"]
    logits_BV, state = sampler.prefill(params, PROMPT, max_length=len(PROMPT) + 100, chunk=64)
    start = lambda: sampler.tokens(params, logits_BV, state, key=jax.random.key(0), sampling=GREEDY)
    assert list(itertools.islice(start(), 5)) == list(itertools.islice(start(), 5))


def test_few_compilations(built):
    sampler, params = Sampler(built["mesa"][0].model), built["mesa"][1]
    for length in (3, 6, 7):  # 2 + 1, 4 + 2, 4 + 2 + 1
        logits_BV, state = sampler.prefill(params, PROMPT[:length], max_length=100, chunk=4)
        tokens = sampler.tokens(params, logits_BV, state, key=jax.random.key(length), sampling=GREEDY)
        list(itertools.islice(tokens, 8))
    assert sampler._extend._cache_size() == 3
    assert sampler._step._cache_size() == 1


def test_state_of_mesa_is_constant_and_attentions_grows(built):
    def size(mixer, length):
        sampler, params = built[mixer]
        return state_bytes(
            jax.eval_shape(lambda params: sampler.model.init_state(params, 1, max_length=length), params)
        )

    assert size("mesa", 10) == size("mesa", 10_000)
    assert size("attention", 10_000) > 900 * size("attention", 10)


# ---- streaming

TEXT = "naïve café — 東京 🎉 done"


def test_stream_never_shows_part_of_a_character():
    ids, decoder = Bytes().encode([TEXT])[0].tolist(), StreamDecoder(Bytes().decode)
    pieces = [decoder.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TEXT and decoder.finish() == ""
    assert pieces[ids.index(0xC3) : ids.index(0xC3) + 2] == ["", "ï"]  # as soon as it is whole


def test_stream_keeps_what_is_really_broken():
    decoder = StreamDecoder(Bytes().decode)
    pieces = [decoder.push(token) for token in [0x61, 0xE6, 0x62, 0xF0, 0x9F]]
    assert pieces == ["a", "", "\ufffdb", "", ""]
    assert decoder.finish() == "\ufffd"


def test_stream_leaves_out_the_prompt():
    prompt = Bytes().encode(["It is"])[0].tolist()
    assert StreamDecoder(Bytes().decode, prompt).push(ord("!")) == "!"


# ---- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("generate")
    save_run(root / "run", prepare_data(root / "data", seq_len=32, eos=True), mixer="mesa")
    return f"--workdir={root / 'run'}"


def output(capsys, *argv):
    generate.main(list(argv))
    return capsys.readouterr()


def test_command(run, capsys):
    shown = output(capsys, run, "--prompt=The café", "--max_tokens=20", "--step=4")
    assert shown.out.startswith("The café") and shown.out.endswith("\n") and len(shown.out) > len("The café\n")
    assert "tokens/s" in shown.err and "bytes a sequence" in shown.err


def test_a_sample_does_not_depend_on_how_many(run, capsys):
    """An empty prompt, which is BOS alone; the same seed gives the same text in another call."""
    one = output(capsys, run, "--max_tokens=10").out
    two = output(capsys, run, "--max_tokens=10", "--num_samples=2").out
    first, second = two.removeprefix("--- sample 1 of 2\n").split("--- sample 2 of 2\n")
    assert first == one != second


def test_prompt_from_stdin_file_or_flag(monkeypatch, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("naïve\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("naïve\n"))
    read = lambda prompt, prompt_file=None: generate.read_prompt(
        SimpleNamespace(prompt=prompt, prompt_file=prompt_file)
    )
    assert read("-") == read("", file) == read("naïve\n")
    with pytest.raises(UserError, match="give one of them"):
        read("a", file)


def test_stops_at_the_end_of_a_document(run, capsys, monkeypatch):
    stop = Bytes.eos_id
    monkeypatch.setattr(Sampler, "tokens", lambda *_, **__: iter([ord("x"), ord("y"), stop, ord("z")]))
    assert output(capsys, run, "--prompt=a").out == "axy\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--temperature=-1", "temperature=-1"), ("--top_p=0", "top_p=0"), ("--top_k=-2", "top_k=-2"),
        ("--max_tokens=0", "--max_tokens=0"), ("--num_samples=0", "--num_samples=0"), ("--step=7", r"\[4, 8\]"),
        ("--prompt_file=missing.txt", "missing.txt"), ("--max_token=3", "did you mean --max_tokens"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run, argv, message):
    with pytest.raises(UserError, match=message) as raised:
        generate.main([run, argv])
    assert "\n" not in str(raised.value)


def test_empty_workdir(tmp_path):
    with pytest.raises(UserError, match="no run"):
        generate.main([f"--workdir={tmp_path}", "--prompt=a"])


def test_no_beginning_without_bos():
    rows = SimpleNamespace(tokenizer=Bytes(), manifest={"bos": False})
    with pytest.raises(UserError, match="no BOS"):
        generate.prompt_ids(rows, "")
