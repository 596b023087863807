"""The kernel of a decoding step of Mesa: interpreted and lowered for CUDA on CPUs, and run where there is a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import mesanet_kernels as mk
from mesanet_kernels.ops.mesa import step_gpu
from mesanet_kernels.shapes import example
from tests.helpers.op_cases import random_state

SIZES = dict(B=2, T=1, H=2, K=64, V=128)


def token(sizes, *, scale=1.0):
    """Returns the arguments of a decoding step, and a state with eigenvalues from 0 up."""
    inputs = {name: x[:, 0] if name != "lam" else x for name, x in example("mesa", sizes).items()}
    h_kk, h_kv = random_state("mesa", sizes)
    return inputs, (scale * np.float32(h_kk @ h_kk.swapaxes(-1, -2)), np.float32(h_kv))


def distance(got, wanted):
    """Returns the relative L2 error."""
    return np.linalg.norm(np.asarray(got, np.float64) - wanted) / np.linalg.norm(wanted)


def assert_step(inputs, state, run, *, limit=1e-5):
    """Compares a step with the exact solution in float64, and returns the step."""
    wide = lambda tree: jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), tree)
    with jax.enable_x64(True):
        wanted = jax.device_get(mk.mesa_step(**wide(inputs), state=wide(state), implementation="reference"))
    got = run(**inputs, state=state)
    assert distance(got.o, wanted.o) < limit
    for one, other in zip(got.final_state, wanted.final_state, strict=True):
        assert distance(one, other) < 1e-6
    return got


@pytest.mark.skipif(not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax has no GPU interpreter")
def test_kernel_solves(monkeypatch):
    monkeypatch.setattr(step_gpu, "unsupported_reason", lambda *_: "")
    step = partial(mk.mesa_step, implementation="pallas_gpu")
    with plgpu.force_gpu_interpret_mode():
        inputs, state = token(SIZES, scale=1 / 64)
        assert (assert_step(inputs, state, partial(step, max_iters=60)).iterations == 60).all()
        early = assert_step(inputs, state, partial(step, max_iters=60, tol=1e-3), limit=1e-2)
        assert (early.iterations < 60).all() and (early.iterations > 1).all()
        empty = jax.tree.map(np.zeros_like, state)
        assert_step(inputs, empty, step)


@pytest.mark.parametrize("key, value", [(64, 64), (128, 128)])
def test_kernel_lowers_for_cuda(key, value):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    keys, values = shape(4, key), shape(4, value)
    run = jax.jit(partial(step_gpu._kernel, max_iters=30, tol=1e-3))
    arrays = keys, keys, values, keys, keys, shape(2, key), shape(4, key, key), shape(4, key, value)
    assert "mosaic_gpu" in run.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow  # decoding does not need gradients
def test_gradients_are_those_of_the_op(monkeypatch):
    """The gradients do not come from the kernel, so the kernel is replaced here."""
    monkeypatch.setattr(step_gpu.tiles, "unsupported_reason", lambda _: "")
    monkeypatch.setattr(step_gpu, "_flat", lambda kernel, *x: (x[2], x[6], x[7], jnp.ones(x[0].shape[:2], jnp.int32)))
    inputs, state = token(SIZES, scale=1 / 64)

    def loss(inputs, state, implementation):
        return jnp.sum(mk.mesa_step(**inputs, state=state, implementation=implementation).o)

    one, other = (jax.grad(loss, argnums=(0, 1))(inputs, state, name) for name in (None, "pallas_gpu"))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("key, value", [(64, 64), (64, 128), (128, 128)])
def test_accuracy_on_a_gpu(key, value):
    inputs, state = token(dict(B=3, T=1, H=2, K=key, V=value), scale=1 / key)
    run = jax.jit(partial(mk.mesa_step, implementation="pallas_gpu", max_iters=60))
    assert_step(inputs, state, run, limit=1e-4)


@pytest.mark.gpu
def test_steps_equal_the_row_on_a_gpu():
    """Decoding a row with the kernel agrees with the exact solution of the whole row."""
    sizes = dict(B=1, T=40, H=2, K=64, V=64)
    inputs = example("mesa", sizes)
    step = jax.jit(partial(mk.mesa_step, implementation="pallas_gpu", lam=inputs.pop("lam")))
    state = jax.tree.map(np.zeros_like, random_state("mesa", sizes))
    outputs = []
    for t in range(40):
        o, state, _ = step(**{name: x[:, t] for name, x in inputs.items()}, state=state)
        outputs.append(o)
    wanted = mk.mesa(**inputs, lam=example("mesa", sizes)["lam"], implementation="reference").o
    assert distance(np.stack(outputs, axis=1), np.asarray(wanted)) < 1e-4
