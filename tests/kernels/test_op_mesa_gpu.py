"""Mesa's solve as a Mosaic GPU kernel: in the GPU interpreter and lowered for CUDA here, and run where there is a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hopper import interpreted, needs_interpreter
from mesa_systems import KEYS, systems
from op_cases import assert_close, documents, evaluate, evaluator, mesa, random_state, rounded

from mesanet_kernels.ops.mesa import pallas_gpu
from mesanet_kernels.shapes import example

systems_of = partial(systems, chunk=pallas_gpu.CHUNK, half=pallas_gpu.HALF)


@pytest.fixture
def on_cpu(monkeypatch):
    with interpreted(monkeypatch):
        yield


@needs_interpreter
@pytest.mark.parametrize("keys", KEYS)
def test_kernel_solves(on_cpu, keys):
    """Also the systems that are hard for float16: 5e-4 is a tenth of what bfloat16 inputs are allowed (kernel-api.md)."""
    arrays, exact_RCK = systems_of(keys, 64)
    x_RCK, iterations_RC = pallas_gpu._kernel(*arrays, max_iters=30, tol=0.0)
    assert np.linalg.norm(x_RCK - exact_RCK) < 5e-4 * np.linalg.norm(exact_RCK)
    assert iterations_RC.max() <= 30
    x_RCK, fewer_RC = pallas_gpu._kernel(*arrays, max_iters=30, tol=1e-3)
    assert (fewer_RC <= iterations_RC).all() and fewer_RC.mean() < iterations_RC.mean()
    assert np.linalg.norm(x_RCK - exact_RCK) < 1e-2 * np.linalg.norm(exact_RCK)


@pytest.mark.parametrize("size", pallas_gpu.KEY_SIZES)
@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_kernel_lowers_for_cuda(size, tol):
    arrays, _ = systems_of("random", size)
    run = jax.jit(lambda *arrays: pallas_gpu._kernel(*arrays, max_iters=30, tol=tol))
    assert "mosaic_gpu" in run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.gpu
@pytest.mark.parametrize("size", pallas_gpu.KEY_SIZES)
def test_accuracy_of_the_default_on_a_gpu(size):
    """kernel-api.md: bfloat16 inputs 5e-3, gradients twice that, with documents and an initial state; T is ragged."""
    sizes = dict(B=2, T=200, H=2, K=size, V=size)
    inputs, state = rounded(example("mesa", sizes)), random_state("mesa", sizes)
    ids = documents(sizes, 70, 131)
    wanted = evaluate(
        lambda x, state: mesa(x, segment_ids=ids, state=state, implementation="reference"),
        inputs,
        state=state,
        dtype=jnp.float64,
    )
    run = evaluator(lambda x, state: mesa(x, segment_ids=ids, state=state), dtype=jnp.bfloat16)
    assert_close(run(inputs, state=state), wanted, limit=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", [None, "pallas_gpu"])
def test_gradients_do_not_depend_on_the_cotangents_scale_on_a_gpu(implementation):
    inputs = rounded(example("mesa", dict(B=1, T=128, H=2, K=128, V=128)))
    run = evaluator(lambda x: mesa(x, implementation=implementation)[0], dtype=jnp.bfloat16)
    cotangent = np.random.default_rng(5).standard_normal(inputs["v"].shape).astype(np.float32)
    one, small = (run(inputs, cotangents=[scale * cotangent])[1][0] for scale in (1.0, 2.0**-30))
    for name, gradient in one.items():
        np.testing.assert_allclose(
            small[name] * 2.0**30, gradient, rtol=0, atol=1e-2 * np.abs(gradient).max(), err_msg=name
        )


@pytest.mark.gpu
@pytest.mark.parametrize("keys", KEYS)
def test_hard_systems_on_a_gpu(keys):
    for size in pallas_gpu.KEY_SIZES:
        arrays, exact_RCK = systems_of(keys, size)
        x_RCK, _ = jax.jit(lambda *arrays: pallas_gpu._kernel(*arrays, max_iters=30, tol=0.0))(*arrays)
        assert np.linalg.norm(x_RCK - exact_RCK) < 2e-3 * np.linalg.norm(exact_RCK)
