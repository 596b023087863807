"""The distributions that tokens are drawn from.

B sequences, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax.errors import UserError
from mesanet_jax.inference.sampling import Sampling, truncate


def kept(logits, **options):
    return np.isfinite(np.asarray(truncate(jnp.asarray(logits, jnp.float32), **options)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("top_k", [1, 3, 50])
def test_top_k_keeps_the_k_most_likely(seed, top_k):
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
        assert inside[1:].sum() < top_p  # not enough without the least likely of them
        assert probs_V[~kept_V].max(initial=0) < inside[0]


def test_top_p_applies_to_the_top_k():
    """The first two of (0.5, 0.3, 0.2) have 0.8; renormalised, the first alone has 0.625, which is at least 0.6."""
    logits = np.log([[0.5, 0.3, 0.2]])
    assert kept(logits, top_k=2, top_p=0.6).tolist() == [[True, False, False]]
    assert kept(logits, top_k=0, top_p=0.6).tolist() == [[True, True, False]]


def test_temperature_scales_the_logits():
    """The frequencies of 20,000 draws are those of softmax(logits / 2), within four standard deviations."""
    logits_V, draws = jnp.array([0.0, 1.0, 2.0, 3.0]), 20_000
    tokens_B = Sampling(temperature=2.0).draw(jnp.tile(logits_V, (draws, 1)), jax.random.key(0))
    expected_V = np.asarray(jax.nn.softmax(logits_V / 2.0))
    counts_V = np.bincount(tokens_B, minlength=4)
    assert (abs(counts_V / draws - expected_V) < 4 * np.sqrt(expected_V * (1 - expected_V) / draws)).all()


def test_greedy_is_argmax_for_every_key():
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
