"""Accuracy of plain XLA against the reference in float64: outputs, final states and all gradients.

The limits are those of docs/kernels.md, "Public functions".
"""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

WITH_DECAY = [op for op in cases.RECURRENT if "log_decay" in shapes.example(op, "tiny")]


def oracle(op, inputs, **options):
    """Returns outputs and gradients of the reference in float64."""
    state = options.pop("state", None)
    return cases.evaluate(
        partial(cases.ALL[op], implementation="reference", **options), inputs, state=state, dtype=jnp.float64
    )


def attempt(op, inputs, *, state=None, dtype=None, **options):
    """Returns outputs and gradients of plain XLA."""
    return cases.evaluate(partial(cases.ALL[op], implementation="xla", **options), inputs, state=state, dtype=dtype)


@pytest.mark.parametrize("shape", ["tiny", "ragged"])
@pytest.mark.parametrize("op", cases.ALL)
def test_float32(op, shape):
    inputs = shapes.example(op, shape)
    cases.assert_close(attempt(op, inputs), oracle(op, inputs), limit=cases.LIMITS.get(op, 1e-5))


@pytest.mark.parametrize("op", cases.ALL)
def test_bfloat16_inputs(op):
    inputs = cases.rounded(shapes.example(op, "ragged"))
    cases.assert_close(attempt(op, inputs, dtype=jnp.bfloat16), oracle(op, inputs), limit=5e-3)


@pytest.mark.parametrize("op", cases.ALL)
def test_float64_agrees_to_rounding(op):
    inputs = shapes.example(op, "tiny")
    cases.assert_close(attempt(op, inputs, dtype=jnp.float64), oracle(op, inputs), limit=1e-12)


@pytest.mark.parametrize("op", cases.RECURRENT)
def test_initial_state_and_documents(op):
    sizes = shapes.SHAPES[op]["ragged"]
    options = dict(state=cases.random_state(op, sizes), segment_ids=cases.documents(sizes, 2, 17, 66))
    inputs = shapes.example(op, "ragged")
    cases.assert_close(attempt(op, inputs, **options), oracle(op, inputs, **options), limit=cases.LIMITS.get(op, 1e-5))


@pytest.mark.parametrize("length, chunk", [(1, 16), (2, 1), (17, 16), (17, 3)])
@pytest.mark.parametrize("op", WITH_DECAY)
def test_any_length_and_chunk(op, length, chunk):
    sizes = shapes.SHAPES[op]["tiny"] | {"T": length}
    inputs = shapes.example(op, sizes)
    options = dict(state=cases.random_state(op, sizes))
    cases.assert_close(
        attempt(op, inputs, chunk_size=chunk, **options),
        oracle(op, inputs, **options),
        limit=cases.LIMITS.get(op, 1e-5),
    )


@pytest.mark.parametrize("op", WITH_DECAY)
def test_extreme_gates(op):
    """Each row of the batch is a case; small decays between extreme ones must keep their precision."""
    gates = [(decay, beta) for decay in (0.0, -0.1, -3.0, -1e4, -np.inf) for beta in (0.0, 1.0)]
    inputs = shapes.example(op, shapes.SHAPES[op]["tiny"] | {"B": len(gates)})
    for row, (log_decay, beta) in enumerate(gates):
        inputs["log_decay"][row, ::3] = log_decay
        inputs["beta"][row, ::3] = beta
    cases.assert_close(attempt(op, inputs), oracle(op, inputs), limit=cases.LIMITS.get(op, 1e-5))


@pytest.mark.parametrize("op", [*WITH_DECAY, "mlstm"])
def test_values_narrower_than_keys(op):
    """The other shapes have values that are wider than keys, like published layers."""
    sizes = shapes.SHAPES[op]["tiny"] | {"V": 5}
    inputs, state = shapes.example(op, sizes), cases.random_state(op, sizes)
    cases.assert_close(
        attempt(op, inputs, state=state), oracle(op, inputs, state=state), limit=cases.LIMITS.get(op, 1e-5)
    )


@pytest.mark.parametrize("window", [1, 3, 64, 1000])
def test_attention_window_and_documents(window):
    sizes = shapes.SHAPES["attention"]["ragged"]
    options = dict(window=window, segment_ids=cases.documents(sizes, 2, 100, 131))
    inputs = shapes.example("attention", "ragged")
    cases.assert_close(attempt("attention", inputs, **options), oracle("attention", inputs, **options), limit=1e-5)


def test_cross_entropy_padding_and_weights():
    inputs = shapes.example("softmax_cross_entropy", "ragged")
    inputs["targets"] %= 33
    weights = (np.random.default_rng(5).random(inputs["targets"].shape) > 0.4).astype(np.float32)
    inputs["weights"] = weights

    def call(inputs, *, implementation):
        return mk.softmax_cross_entropy(
            **inputs, vocab_size=33, softcap=5.0, block_size=16, implementation=implementation
        )

    wanted = cases.evaluate(partial(call, implementation="reference"), inputs, dtype=jnp.float64)
    loss, gradients = got = cases.evaluate(partial(call, implementation="xla"), inputs)
    cases.assert_close(got, wanted, limit=1e-5)
    assert np.all(loss[weights == 0] == 0) and np.all(gradients[0]["hidden"][weights == 0] == 0)
    assert np.all(gradients[0]["embedding"][33:] == 0)
