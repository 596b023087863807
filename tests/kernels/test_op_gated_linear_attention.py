"""Golden vectors of gated linear attention (flash-linear-attention, float64)."""

import jax
import jax.numpy as jnp
import numpy as np
import op_cases as cases
import pytest

import mesanet_kernels as mk

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
@pytest.mark.parametrize("implementation, dtype, limit", [("reference", jnp.float64, 1e-12), ("xla", None, 1e-5)])
def test_scalar_decay(path, implementation, dtype, limit):
    found = errors(path, implementation, dtype, decay="g", beta="in_beta" in np.load(path))
    assert max(found.values()) < limit, found


def test_vector_decay():
    found = errors(cases.GOLDEN / "gla_vector_gate.npz", "reference", jnp.float64, decay="gk", beta=False)
    assert max(found.values()) < 1e-12, found
