"""Golden values of the delta rules (flash-linear-attention, float64), and their behaviour without decay."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from mesanet_kernels.ops.delta_rule.triangular import unit_lower_inverse
from tests.helpers import op_cases as cases

NAMES = {"q": "q", "k": "k", "v": "v", "beta": "beta", "log_decay": "g"}
LONG = dict(B=1, T=4096, H=2, K=16, V=8)


@pytest.mark.parametrize("path", sorted(cases.GOLDEN.glob("*delta_*.npz")), ids=lambda path: path.stem)
@pytest.mark.parametrize("implementation, dtype, limit", [("reference", jnp.float64, 1e-12), ("xla", None, 1e-5)])
def test_golden(path, implementation, dtype, limit):
    data = np.load(path)
    names = {ours: theirs for ours, theirs in NAMES.items() if f"in_{theirs}" in data}
    inputs = {ours: data[f"in_{theirs}"] for ours, theirs in names.items()}
    state = data["in_h0"] if "in_h0" in data else None

    def call(inputs, state=None):
        o, final = cases.delta_rule(inputs, state=state, implementation=implementation)
        return o, jax.lax.stop_gradient(final)

    outputs, (gradients, dstate) = cases.evaluate(
        call, inputs, state=state, dtype=dtype, cotangents=[data["cotangent_o"], np.zeros_like(data["out_final"])]
    )
    wanted = {ours: data[f"grad_{theirs}"] for ours, theirs in names.items()}
    errors = cases.relative_errors(
        (outputs, gradients, dstate),
        ((data["out_o"], data["out_final"]), wanted, None if state is None else data["grad_h0"]),
    )
    assert max(errors.values()) < limit, errors


def without_decay(sizes):
    inputs = shapes.example("delta_rule", sizes)
    del inputs["log_decay"]
    return inputs


def test_no_decay_is_a_decay_of_one():
    """Every bit of outputs, states and gradients agrees."""
    inputs = without_decay("ragged")
    state = cases.random_state("delta_rule", shapes.SHAPES["delta_rule"]["ragged"])
    run = cases.evaluator(cases.delta_rule)
    ungated = run(inputs, state=state)
    outputs, (gradients, dstate) = run(inputs | {"log_decay": np.zeros_like(inputs["beta"])}, state=state)
    del gradients["log_decay"]
    jax.tree.map(np.testing.assert_array_equal, ungated, (outputs, (gradients, dstate)))


@pytest.mark.parametrize("dtype, limit", [(None, 1e-5), (jnp.bfloat16, 5e-3)])
def test_errors_do_not_accumulate(dtype, limit):
    """4,096 tokens without decay, compared with float64."""
    inputs = cases.rounded(without_decay(LONG))
    wanted = cases.evaluate(partial(cases.delta_rule, implementation="reference"), inputs, dtype=jnp.float64)
    got = cases.evaluate(cases.delta_rule, inputs, dtype=dtype)
    cases.assert_close(got, wanted, limit=limit)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 2e-6), (jnp.bfloat16, 2e-2)])
def test_a_token_repeated_4096_times(dtype, tolerance):
    """With beta = 1 a token is recalled exactly, and writing it again changes nothing: o is (q.k) v / |k|^2."""
    token = {name: jnp.asarray(x[:, :1], dtype) for name, x in without_decay(LONG).items()}
    q, k, v, beta = (jnp.broadcast_to(x, (1, LONG["T"], *x.shape[2:])) for x in token.values())
    beta = jnp.ones_like(beta, jnp.float32)
    (o, _), gradients_of = jax.vjp(mk.delta_rule, q, k, v, beta)
    wide_q, wide_k, wide_v = (x.astype(jnp.float32) for x in (q, k, v))
    wanted = jnp.sum(wide_q * wide_k, axis=-1, keepdims=True) * wide_v
    np.testing.assert_allclose(o.astype(jnp.float32), wanted, atol=tolerance)
    gradients = gradients_of((jnp.ones_like(o), jnp.ones((1, 2, LONG["K"], LONG["V"]), jnp.float32)))
    assert all(jnp.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("size", [1, 2, 16, 64])
def test_inverse_and_its_gradient(size):
    """Compares with LAPACK in float64; one of the systems is that of a repeated token."""
    rng = np.random.default_rng(0)
    lower = np.stack(
        [np.tril(rng.standard_normal((size, size)) / np.sqrt(size), -1), np.tril(np.ones((size, size)), -1)]
    )
    cotangent = rng.standard_normal(lower.shape)
    wanted = np.linalg.inv(np.eye(size) + lower)
    gradient = np.tril(-wanted.swapaxes(1, 2) @ cotangent @ wanted.swapaxes(1, 2), -1)
    with jax.enable_x64(True):
        inverse, pullback = jax.vjp(unit_lower_inverse, jnp.asarray(lower))
        np.testing.assert_allclose(inverse, wanted, atol=1e-12)
        np.testing.assert_allclose(pullback(jnp.asarray(cotangent))[0], gradient, atol=1e-10)
