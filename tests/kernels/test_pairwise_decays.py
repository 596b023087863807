"""Pairwise sums of log decays contain exactly the terms between two tokens, and no exponential overflows."""

import jax
import jax.numpy as jnp
import numpy as np

from mesanet_kernels.linear_recurrence.pairwise_decays import pairwise_values


def test_sums_of_own_terms():
    """One huge term would ruin every running sum after it; all sums that do not contain it keep their precision."""
    log_decay = -np.random.default_rng(0).random((1, 1, 1, 16, 1)).astype(np.float32)
    log_decay[..., 6, :] = -1e30
    diagonal = np.zeros(log_decay.shape[:-1], np.float32)
    pairs, since, until = pairwise_values(diagonal, log_decay, lambda since, until, size: since + until.mT)
    g = log_decay.astype(np.float64).ravel()
    between = np.array([[g[s + 1 : t + 1].sum() for s in range(16)] for t in range(16)])
    np.testing.assert_allclose(np.tril(pairs[0, 0, 0]), between, rtol=1e-6)
    np.testing.assert_allclose(since.ravel(), [g[: t + 1].sum() for t in range(16)], rtol=1e-6)
    np.testing.assert_allclose(until.ravel(), [g[t + 1 :].sum() for t in range(16)], rtol=1e-6)


def test_no_exponent_is_positive():
    seen = []

    def across(since, until, size):
        seen.append((size, float(since.max()), float(until.max())))
        return since + until.mT

    log_decay = -np.random.default_rng(0).random((1, 1, 1, 64, 1)).astype(np.float32)
    with jax.disable_jit():
        pairwise_values(jnp.zeros(log_decay.shape[:-1]), log_decay, across)
    assert [size for size, *_ in seen] == [1, 2, 4, 8, 16, 32]
    assert all(since <= 0 and until <= 0 for _, since, until in seen)
