"""The decoding engine: what its tokens must not depend on, and how much it compiles and keeps."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import models
from mesanet_jax.inference.sampler import Sampler, chunk_sizes, state_bytes
from mesanet_jax.inference.sampling import Sampling
from tests.helpers.tiny_run import CONFIGS

MIXERS = ("mesa", "attention")
PROMPT = np.random.default_rng(0).integers(0, 256, 67).tolist()
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=1.0)


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
    """{mixer: (sampler, params)} of untrained models, so that the tests share what their samplers compile."""

    def make(mixer):
        config = CONFIGS[mixer].get_config("smoke").model
        config.vocab_size = 259  # padded to 384
        model = models.build(config)
        return Sampler(model), jax.jit(model.init)(jax.random.key(1))

    return {mixer: make(mixer) for mixer in MIXERS}


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
    """Each token is the most likely one after the whole text so far, as the training form computes it."""
    sampler, params = built[mixer]
    text = PROMPT + continuation(sampler, params)

    @jax.jit
    def most_likely(params, tokens_BT):
        bound = sampler.model.bind(params)
        return jnp.argmax(bound.logits(bound.hidden(tokens_BT, jnp.zeros_like(tokens_BT))), axis=-1)

    predicted = most_likely(params, jnp.array([text], jnp.int32))[0]
    assert predicted[len(PROMPT) - 1 : -1].tolist() == text[len(PROMPT) :]


def test_padding_of_the_vocabulary_is_never_drawn(built):
    """At this temperature, padding would be drawn if it could be: it is a third of the 384 rows."""
    tokens = continuation(*built["mesa"], count=100, sampling=Sampling(temperature=50.0))
    assert 200 < max(tokens) < 259


def test_the_seed_decides(built):
    def draw(seed):
        return continuation(*built["mesa"], sampling=WARM, seed=seed)

    assert draw(0) == draw(0) != draw(1)


def test_tokens_leave_the_prefilled_state_unchanged(built):
    sampler, params = built["mesa"]
    logits_BV, state = sampler.prefill(params, PROMPT, max_length=len(PROMPT) + 100, chunk=64)

    def first_five():
        tokens = sampler.tokens(params, logits_BV, state, key=jax.random.key(0), sampling=GREEDY)
        return list(itertools.islice(tokens, 5))

    assert first_five() == first_five()


def test_few_compilations(built):
    sampler, params = Sampler(built["mesa"][0].model), built["mesa"][1]
    for length in (3, 6, 7):  # 2 + 1, 4 + 2, 4 + 2 + 1
        logits_BV, state = sampler.prefill(params, PROMPT[:length], max_length=100, chunk=4)
        tokens = sampler.tokens(params, logits_BV, state, key=jax.random.key(length), sampling=GREEDY)
        list(itertools.islice(tokens, 8))
    assert sampler._extend._cache_size() == 3
    assert sampler._decode_step._cache_size() == 1


def test_an_empty_prompt_is_refused(built):
    sampler, params = built["mesa"]
    with pytest.raises(ValueError, match="at least one token"):
        sampler.prefill(params, [], max_length=10, chunk=4)


def test_the_state_of_mesa_is_constant_and_that_of_attention_grows(built):
    def size(mixer, length):
        model, params = built[mixer][0].model, built[mixer][1]
        return state_bytes(jax.eval_shape(lambda params: model.init_state(params, 1, max_length=length), params))

    assert size("mesa", 10) == size("mesa", 10_000)
    assert size("attention", 10_000) > 900 * size("attention", 10)
