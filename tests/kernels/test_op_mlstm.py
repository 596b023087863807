"""What only mLSTM has: golden values (mlstm_kernels, float64), extreme gates, long and repeated inputs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

NAMES = dict(q="q", k="k", v="v", i="input_gate", f="forget_gate")
GOLDEN = sorted(cases.GOLDEN.glob("mlstm_*.npz"))


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize("implementation, dtype, limit", [("reference", jnp.float64, 1e-12), ("xla", None, 1e-5)])
def test_golden(path, implementation, dtype, limit):
    data = np.load(path)

    def call(inputs):
        return cases.mlstm(inputs, implementation=implementation)[0]

    inputs = {name: data["in_" + key] for key, name in NAMES.items()}
    got = cases.evaluate(call, inputs, dtype=dtype, cotangents=[data["cotangent_o"]])
    wanted = {name: data["grad_" + key] for key, name in NAMES.items()}
    cases.assert_close(got, (data["out_o"], (wanted, None)), limit=limit)
    assert len(GOLDEN) == 2


def against_reference(inputs, *, chunk_size=None, **options):
    """Compares values and gradients of "xla" in float32 with the reference in float64, and returns the former."""
    got, wanted = (
        cases.evaluate(
            partial(cases.mlstm, implementation=implementation, chunk_size=chunk_size), inputs, dtype=dtype, **options
        )
        for implementation, dtype in (("xla", None), ("reference", jnp.float64))
    )
    cases.assert_close(got, wanted, limit=1e-5)
    return got


@pytest.mark.parametrize("length, chunk", [(1, 16), (2, 1), (17, 16), (17, 4)])
def test_any_length_and_chunk(length, chunk):
    sizes = shapes.SHAPES["mlstm"]["tiny"] | {"T": length}
    inputs = shapes.example("mlstm", sizes)
    against_reference(inputs, state=cases.random_state("mlstm", sizes), chunk_size=chunk)


def test_extreme_gates():
    """Each row of the batch is a case: gates closed, wide open, and far outside the range of the exponential.

    Keys and queries are positive. Where only two tokens are left, n^T q could otherwise cancel, and the output, which
    is divided by it, would be meaningless in float32.
    """
    gates = [(i, f) for i in (-np.inf, -200.0, 0.0, 200.0) for f in (-np.inf, -1e4, 0.0, 1e4)]
    inputs = shapes.example("mlstm", shapes.SHAPES["mlstm"]["tiny"] | {"B": len(gates)})
    inputs |= {name: np.abs(inputs[name]) for name in "qk"}
    for row, (input_gate, forget_gate) in enumerate(gates):
        inputs["input_gate"][row, ::3] = input_gate
        inputs["forget_gate"][row, ::3] = forget_gate
    against_reference(inputs, chunk_size=4)


def test_nothing_was_ever_written():
    """With all input gates closed, the state is empty, the output is zero, and nothing is NaN."""
    inputs = shapes.example("mlstm", "ragged")
    inputs["input_gate"][:] = -np.inf
    inputs["forget_gate"][:] = -5.0  # without its floor, m would fall to -350
    (o, _), gradients = against_reference(inputs)
    assert not o.any() and all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_a_token_repeated_4096_times():
    """Nothing is forgotten. Once n^T q exceeds its lower bound, o is v, and q has no gradient."""
    one = shapes.example("mlstm", dict(B=1, T=1, H=1, K=8, V=8))
    inputs = {name: np.repeat(x, 4096, axis=1) for name, x in one.items()}
    inputs["forget_gate"][:] = 20.0
    q = inputs.pop("q")

    def call(inputs, implementation):
        return cases.mlstm(inputs | {"q": q}, implementation=implementation)

    got = cases.evaluate(partial(call, implementation="xla"), inputs)
    wanted = cases.evaluate(partial(call, implementation="reference"), inputs, dtype=jnp.float64)
    cases.assert_close(got, wanted, limit=1e-5)


def test_the_stabiliser_changes_nothing():
    """The same state written with another m gives the same outputs, except for the epsilon."""
    sizes = shapes.SHAPES["mlstm"]["tiny"]
    cell, normaliser, m = cases.random_state("mlstm", sizes)
    run = jax.jit(cases.mlstm)
    inputs = shapes.example("mlstm", sizes)
    o, _ = run(inputs, state=(cell, normaliser, m))
    shifted = np.float32(np.exp(-3))
    other, _ = run(inputs, state=(cell * shifted, normaliser * shifted, m + 3))
    np.testing.assert_allclose(other, o, rtol=1e-4, atol=1e-4)


def test_the_stabiliser_of_a_new_document():
    """Where little is written, m is the decayed 0 that a document starts with, in every chunk."""
    inputs = shapes.example("mlstm", "ragged")
    inputs["input_gate"] -= 30.0
    sizes = shapes.SHAPES["mlstm"]["ragged"]
    options = dict(segment_ids=cases.documents(sizes, 3, 30), state=cases.random_state("mlstm", sizes))
    (_, (_, _, m)), (_, (_, _, wanted_m)) = (
        jax.jit(partial(cases.mlstm, implementation=name, chunk_size=16, **options))(inputs)
        for name in ("xla", "reference")
    )
    assert wanted_m.min() > -30 and wanted_m.max() < -1
    np.testing.assert_allclose(m, wanted_m, rtol=1e-5)
