"""Golden values of gated linear attention (flash-linear-attention, float64), and very different decays together."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

SCALAR_OP, VECTOR_OP = "gated_linear_attention", "gated_linear_attention_vector"
IMPLEMENTATIONS = [("reference", jnp.float64, 1e-12), ("xla", None, 1e-5)]
SCALAR = sorted(cases.GOLDEN.glob("scalar_gla_*.npz"))


def errors(path, implementation, dtype, *, decay, beta):
    data = np.load(path)
    names = ["q", "k", "v", decay] + (["beta"] if beta else [])
    inputs = {name: data["in_" + name] for name in names}
    state = data["in_h0"] if "in_h0" in data else None

    def call(inputs, state=None):
        q, k, v, log_decay, *rest = (inputs[name] for name in names)
        o, final = mk.gated_linear_attention(
            q, k, v, log_decay, beta=rest[0] if rest else None, initial_state=state, implementation=implementation
        )
        return o, jax.lax.stop_gradient(final)

    outputs, (gradients, dstate) = cases.evaluate(
        call, inputs, state=state, dtype=dtype, cotangents=[data["cotangent_o"], np.zeros_like(data["out_final"])]
    )
    wanted = {name: data["grad_" + name] for name in names}
    return cases.relative_errors(
        (outputs, gradients, dstate),
        ((data["out_o"], data["out_final"]), wanted, None if state is None else data["grad_h0"]),
    )


@pytest.mark.parametrize("path", SCALAR, ids=lambda path: path.stem)
@pytest.mark.parametrize("implementation, dtype, limit", IMPLEMENTATIONS)
def test_scalar_decay(path, implementation, dtype, limit):
    found = errors(path, implementation, dtype, decay="g", beta="in_beta" in np.load(path))
    assert max(found.values()) < limit, found


@pytest.mark.parametrize("implementation, dtype, limit", IMPLEMENTATIONS)
def test_vector_decay(implementation, dtype, limit):
    found = errors(cases.GOLDEN / "gla_vector_gate.npz", implementation, dtype, decay="gk", beta=False)
    assert max(found.values()) < limit, found


def test_vector_decay_of_equal_channels_is_the_scalar_one():
    inputs = shapes.example(SCALAR_OP, "ragged")
    run = jax.jit(lambda log_decay: mk.gated_linear_attention(**inputs | {"log_decay": log_decay}))
    vector = np.repeat(inputs["log_decay"][..., None], inputs["k"].shape[-1], axis=-1)
    found = cases.relative_errors(run(vector), run(inputs["log_decay"]))
    assert max(found.values()) < 1e-6, found


def test_channels_do_not_disturb_each_other():
    """Channels that forget everything at every third token do not disturb those that forget little or nothing."""
    inputs = shapes.example(VECTOR_OP, "ragged")
    inputs["log_decay"][..., ::4] = 0.0
    inputs["log_decay"][:, ::3, :, 1::4] = -np.inf
    inputs["log_decay"][:, ::3, :, 2::4] = -1e4
    run = cases.evaluator(cases.gated_linear_attention)
    wanted = cases.evaluate(
        partial(cases.gated_linear_attention, implementation="reference"), inputs, dtype=jnp.float64
    )
    got = run(inputs)
    cases.assert_close(got, wanted, limit=1e-5)
    for name in ("k", "log_decay"):  # the error of each kind of channel, relative to its own norm
        for kind in range(4):
            channels = got[1][0][name][..., kind::4], wanted[1][0][name][..., kind::4]
            assert max(cases.relative_errors(*channels).values()) < 2e-5, (name, kind)


@pytest.mark.parametrize("op", [SCALAR_OP, VECTOR_OP])
@pytest.mark.parametrize("dtype, limit", [(None, 1e-5), (jnp.bfloat16, 5e-3)])
def test_a_token_repeated_4096_times(op, dtype, limit):
    """In half of the heads nothing is forgotten, and o grows to 4,096 v.

    The query is the key, so that q.k does not nearly cancel: the rounding error of one token is repeated 4,096 times
    and does not average out.
    """
    one = shapes.example(op, dict(B=1, T=1, H=2, K=8, V=4))
    one["q"] = one["k"]
    one["log_decay"][:, :, 0] = 0.0
    inputs = cases.rounded({name: np.repeat(x, 4096, axis=1) for name, x in one.items()})
    wanted = cases.evaluate(
        partial(cases.gated_linear_attention, implementation="reference"), inputs, dtype=jnp.float64
    )
    got = cases.evaluate(cases.gated_linear_attention, inputs, dtype=dtype)
    cases.assert_close(got, wanted, limit=limit)
