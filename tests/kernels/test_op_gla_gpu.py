"""Gated linear attention as Mosaic GPU kernels: interpreted and lowered for CUDA on CPUs, and run on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_kernels.linear_recurrence.gpu import states
from mesanet_kernels.ops.gated_linear_attention import pallas_gpu
from mesanet_kernels.shapes import example
from mesanet_kernels.tiles import gpu as tiles
from tests.helpers import op_cases
from tests.helpers.hopper import interpreted, lowers, needs_interpreter
from tests.helpers.op_cases import assert_close, cast_floating, gated_linear_attention

OP = "gated_linear_attention"
LIMIT = 5e-3  # with bfloat16 inputs (docs/kernels.md, "Public functions")
against_float64 = partial(op_cases.against_float64, gated_linear_attention, "pallas_gpu")


@needs_interpreter
def test_segments(monkeypatch):
    """Four chunks as four concurrent segments, forwards and backwards in time."""
    monkeypatch.setattr(states, "SHORTEST", 1)
    assert states._segments(4, 2) == 4
    with interpreted(monkeypatch):
        found, wanted = against_float64(dict(B=1, T=256, H=2, K=64, V=64), 20, 128)
    assert_close(found, wanted, limit=LIMIT)


def test_few_long_rows_are_cut_in_segments():
    assert states._segments(512, 8 * 4) == 16
    assert states._segments(32, 16 * 8 * 4) == 1
    assert states._segments(31, 1) == 1
    assert states._segments(32, 1) == 4


@needs_interpreter
def test_outputs_and_gradients(monkeypatch):
    """Three chunks, the last incomplete; one document starts inside the first chunk, one with the second chunk."""
    with interpreted(monkeypatch):
        found, wanted = against_float64(dict(B=1, T=150, H=2, K=64, V=128), 20, 64)
    assert_close(found, wanted, limit=LIMIT)


@needs_interpreter
@pytest.mark.parametrize("backwards", [False, True])
def test_exact_states(monkeypatch, backwards):
    """States in the precision of float32, which Mesa's systems need, from the same kernel."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    k_BTHK, v_BTHV = (jnp.asarray(draw(1, 128, 1, 64), jnp.bfloat16) for _ in range(2))
    weight_NBHC, carry_NBH, state = abs(draw(2, 1, 1, 64)), abs(draw(2, 1, 1)), draw(1, 1, 64, 64)
    with interpreted(monkeypatch):
        parts, final = states.states_gpu(
            (k_BTHK,),
            (v_BTHV,),
            weight_NBHC,
            carry_NBH,
            state,
            backwards=backwards,
            factors=3,
            stored=(jnp.float16,) * 2,
        )
    wanted = {}
    for n in range(2)[::-1] if backwards else range(2):
        wanted[n] = state
        k_CK, v_CV = (np.float64(x[0, 64 * n : 64 * n + 64, 0]) for x in (k_BTHK, v_BTHV))
        state = carry_NBH[n] * state + (k_CK * weight_NBHC[n, 0, 0][:, None]).T @ v_CV
    found = np.sum([np.float64(part) for part in parts], axis=0)
    for got, want in ((found[0], wanted[0]), (found[1], wanted[1]), (final, state)):
        assert np.linalg.norm(got - want) < 1e-6 * np.linalg.norm(want)


@pytest.mark.parametrize("key_size, value_size", [(64, 128), (128, 64)])
def test_lowers_for_cuda(monkeypatch, key_size, value_size):
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    inputs = cast_floating(example(OP, dict(B=1, T=150, H=2, K=key_size, V=value_size)), jnp.bfloat16)
    arrays = inputs.values()

    def loss(*arrays):
        outputs = gated_linear_attention(dict(zip(inputs, arrays)), implementation="pallas_gpu")
        return sum(jnp.sum(x) for x in outputs)

    assert lowers(jax.grad(loss, argnums=range(5)), *arrays)


def test_says_what_it_does_not_support():
    inputs = example(OP, dict(B=1, T=64, H=1, K=64, V=64))
    with pytest.raises(NotImplementedError, match="'pallas_gpu' needs q, k and v in bfloat16"):
        gated_linear_attention(inputs, implementation="pallas_gpu")
    with pytest.raises(NotImplementedError, match="needs one decay per head"):
        vector = example(OP + "_vector", dict(B=1, T=64, H=1, K=64, V=64))
        gated_linear_attention(vector, implementation="pallas_gpu")
    halves = [jnp.zeros((1, 64, 1, 32), jnp.bfloat16)] * 3
    assert pallas_gpu.unsupported_reason(64, *halves, jnp.zeros((1, 64, 1))) == "needs an NVIDIA Hopper GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("key_size", tiles.SIZES)
@pytest.mark.parametrize("value_size", tiles.SIZES)
def test_accuracy_on_a_gpu(key_size, value_size):
    found, wanted = against_float64(dict(B=2, T=500, H=3, K=key_size, V=value_size), 70, 131, 320)
    assert_close(found, wanted, limit=LIMIT)
