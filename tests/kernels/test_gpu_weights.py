"""`ChunkWeights` as Mosaic GPU kernels: interpreted on CPUs, and run where there is a GPU."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_kernels.linear_recurrence import chunks
from mesanet_kernels.linear_recurrence.gpu import weights
from mesanet_kernels.shapes import example
from mesanet_kernels.tiles import gpu as tiles
from tests.helpers.hopper import interpreted, needs_interpreter
from tests.helpers.op_cases import assert_close, documents, evaluate

REFERENCE = partial(chunks.chunk_weights, chunk=tiles.CHUNK)


def against_float64(sizes, *boundaries):
    """Returns (weights, gradients) of the kernels and of the definition. Small decays lie between the largest ones."""
    inputs = example("gated_linear_attention", sizes | dict(K=1, V=1))
    gates = {name: inputs[name] for name in ("log_decay", "beta")}
    log_decay = gates["log_decay"]
    log_decay[0, ::5], log_decay[0, 1::5], log_decay[-1, ::3], log_decay[-1, 1::7] = -np.inf, -1e4, 0.0, -90.0
    call = lambda gates, weigh: weigh(gates["log_decay"], gates["beta"], documents(sizes, *boundaries))
    wanted = evaluate(partial(call, weigh=REFERENCE), gates, dtype=jnp.float64)
    return evaluate(partial(call, weigh=weights.chunk_weights_gpu), gates), wanted


def assert_exact(found, wanted):
    """Compares to the precision of float32, also small weights: exp(x) is exact up to x times a rounding error."""
    assert_close(found, wanted, limit=1e-6)
    for got, want in zip(found[0], wanted[0]):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-36)


@needs_interpreter
def test_weights_and_gradients(monkeypatch):
    """Three chunks, the last incomplete; documents start inside a chunk, with one, and with the last token."""
    with interpreted(monkeypatch):
        assert_exact(*against_float64(dict(B=2, T=150, H=2), 20, 64, 148))


@pytest.mark.gpu
def test_accuracy_on_a_gpu():
    assert_exact(*against_float64(dict(B=3, T=1000, H=5), 20, 64, 400, 998))
