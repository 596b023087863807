"""Tests that only the linear scan has: golden values of the RG-LRU, any length, decays of 0 and 1."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

NAMES = ("x", "r_logit", "i_logit", "theta")


@pytest.mark.parametrize("implementation, dtype, limit", [("reference", jnp.float64, 1e-12), ("xla", None, 1e-5)])
def test_rglru_golden(implementation, dtype, limit):
    """The RG-LRU of Griffin (arXiv 2402.19427, section 2.4); the first input of a document is not scaled down."""
    data = np.load(cases.GOLDEN / "rglru_document_reset_at_70.npz")
    segment_ids = np.tile(np.arange(150) >= 70, (2, 1)).astype(np.int32)
    starts = np.isin(np.arange(150), (0, 70))[:, None]

    def rglru(inputs):
        x, r_logit, i_logit, theta = (inputs[name] for name in NAMES)
        log_a = -8 * jax.nn.sigmoid(r_logit) * jax.nn.softplus(theta)
        scale = jnp.where(starts, 1, jnp.sqrt(-jnp.expm1(2 * log_a)))
        x = scale * jax.nn.sigmoid(i_logit) * x
        return mk.linear_scan(x, jnp.exp(log_a), segment_ids=segment_ids, implementation=implementation)[0]

    inputs = {name: data["in_" + name] for name in NAMES}
    got = cases.evaluate(rglru, inputs, dtype=dtype, cotangents=[data["cotangent_o"]])
    cases.assert_close(got, (data["out_o"], ({name: data["grad_" + name] for name in NAMES}, None)), limit=limit)


def against_reference(inputs, **options):
    """Compares outputs and gradients of "xla" in float32 with the reference in float64."""
    got, wanted = (
        cases.evaluate(partial(cases.linear_scan, implementation=implementation), inputs, dtype=dtype, **options)
        for implementation, dtype in (("xla", None), ("reference", jnp.float64))
    )
    cases.assert_close(got, wanted, limit=1e-5)
    return got


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 129])
def test_any_length(length):
    sizes = shapes.SHAPES["linear_scan"]["tiny"] | {"T": length}
    against_reference(shapes.example("linear_scan", sizes), state=cases.random_state("linear_scan", sizes))


def test_decays_of_zero_one_and_below_zero():
    inputs = shapes.example("linear_scan", "ragged")
    for channel, decay in enumerate((0.0, 1.0, -1.0, 1e-30)):
        inputs["a"][:, :: channel + 1, channel] = decay
    against_reference(inputs)


def test_a_token_repeated_4096_times():
    """Without decay, the state is the sum of 4096 equal terms."""
    sizes = dict(B=1, T=4096, D=2)
    inputs = dict(x=np.full((1, 4096, 2), 0.1, np.float32), a=np.ones((1, 4096, 2), np.float32))
    (h, final), _ = against_reference(inputs, state=cases.random_state("linear_scan", sizes))
    np.testing.assert_array_equal(h[:, -1], final)


def test_dtypes():
    inputs = shapes.example("linear_scan", "tiny")
    x, a = jnp.asarray(inputs["x"], jnp.bfloat16), jnp.asarray(inputs["a"])
    (h, final), gradients_of = jax.vjp(mk.linear_scan, x, a)
    assert (h.dtype, final.dtype) == (jnp.bfloat16, jnp.float32)
    assert [g.dtype for g in gradients_of((h, final))] == [jnp.bfloat16, jnp.float32]
