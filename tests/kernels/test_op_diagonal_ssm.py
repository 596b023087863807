"""Tests that only the diagonal state space model has: golden values, discretisation, slow and fast modes, FFT."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from mesanet_kernels.ops.diagonal_ssm import discretise, xla
from tests.helpers import op_cases as cases

IMPLEMENTATIONS = ["reference", "xla", "fft"]
GOLDEN = {"u": "u", "log_rate": "lambda_re", "log_frequency": "lambda_im", "c_re": "c_re", "c_im": "c_im", "skip": "d"}


@pytest.mark.parametrize("dtype, limit", [(jnp.float64, 1e-13), (None, 1e-5)])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_golden(implementation, dtype, limit):
    data = np.load(cases.GOLDEN / "dss_typical.npz")
    inputs = {name: data["in_" + stored] for name, stored in GOLDEN.items()}
    gradients = {name: data["grad_" + stored] for name, stored in GOLDEN.items()}
    run = lambda inputs: mk.diagonal_ssm(**inputs, implementation=implementation)[0]
    got = cases.evaluate(run, inputs, dtype=dtype, cotangents=[data["cotangent_o"]])
    cases.assert_close(got, (data["out_o"], (gradients, None)), limit=limit)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_impulse_gives_the_kernel(implementation):
    """The response to 1, 0, 0, ... is the kernel of the published implementation, plus the skip weight."""
    data = np.load(cases.GOLDEN / "dss_typical.npz")
    inputs = {name: data["in_" + stored] for name, stored in GOLDEN.items()}
    inputs["u"] = np.zeros_like(inputs["u"])
    inputs["u"][:, 0] = 1
    wanted = data["out_kernel"].copy()
    wanted[0] += inputs["skip"]
    y, _ = mk.diagonal_ssm(**inputs, implementation=implementation)
    assert cases.relative_errors(y[0], wanted)[""] < 1e-5


def against_reference(inputs, *, limit=1e-5, state=None, implementation="xla", **options):
    """Compares outputs and gradients of an implementation in float32 with the reference in float64."""
    plain = {name: x for name, x in options.items() if name != "chunk_size"}
    got = cases.evaluate(partial(cases.diagonal_ssm, implementation=implementation, **options), inputs, state=state)
    reference = partial(cases.diagonal_ssm, implementation="reference", **plain)
    wanted = cases.evaluate(reference, inputs, state=state, dtype=jnp.float64)
    cases.assert_close(got, wanted, limit=limit)
    return got


@pytest.mark.parametrize("length, chunk", [(1, None), (2, 1), (16, 16), (17, 16), (65, None)])
def test_any_length_and_chunk(length, chunk):
    sizes = shapes.SHAPES["diagonal_ssm"]["tiny"] | {"T": length}
    options = dict(state=cases.random_state("diagonal_ssm", sizes), segment_ids=cases.documents(sizes, 3, 16))
    against_reference(shapes.example("diagonal_ssm", sizes), chunk_size=chunk, **options)


@pytest.mark.parametrize("length", [1, 2, 65])
def test_fft_of_any_length(length):
    sizes = shapes.SHAPES["diagonal_ssm"]["tiny"] | {"T": length}
    state = cases.random_state("diagonal_ssm", sizes)
    against_reference(shapes.example("diagonal_ssm", sizes), state=state, implementation="fft")


def test_fft_refuses_documents():
    inputs = shapes.example("diagonal_ssm", "tiny")
    with pytest.raises(NotImplementedError, match="'fft' has no segment_ids"):
        mk.diagonal_ssm(**inputs, segment_ids=np.zeros((2, 11), np.int32), implementation="fft")


def test_gain_is_exact_at_every_scale():
    """(e^z - 1) / z and its derivative are right for |z| from 1e-17 to 1e17, in the series and in the quotient."""
    with jax.enable_x64(True):
        log_rate, log_frequency = (x.ravel() for x in np.meshgrid(np.linspace(-40, 40, 33), np.linspace(-40, 3, 27)))
        z, gain = discretise.zero_order_hold(log_rate, log_frequency)
        np.testing.assert_allclose(gain, np.expm1(z) / z, rtol=1e-13)
        derivative = jax.vmap(jax.grad(discretise._gain, holomorphic=True))(z)
        small = np.abs(z) < 1e-3
        np.testing.assert_allclose(derivative[small], (0.5 + z / 3 + z**2 / 8)[small], rtol=1e-9)
        large = np.abs(z) > 0.1
        wanted = ((np.exp(z) * z - np.expm1(z)) / z**2)[large]
        np.testing.assert_allclose(derivative[large], wanted, rtol=1e-11, atol=1e-35)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_slow_and_fast_modes(implementation):
    """One system has modes that never decay or vanish at once, and that are constant or turn by pi per token."""
    logs = (-1e4, -100.0, -41.0, -10.0, 0.0, 4.0, 100.0, 1e4)
    frequencies = (-1e4, -41.0, -5.0, np.log(np.pi))
    sizes = dict(B=1, T=70, H=3, N=len(logs) * len(frequencies))
    inputs = shapes.example("diagonal_ssm", sizes)
    grid = np.meshgrid(np.float32(logs), np.float32(frequencies))
    inputs["log_rate"], inputs["log_frequency"] = (x.ravel() for x in grid)
    state = cases.random_state("diagonal_ssm", sizes)
    against_reference(inputs, state=state, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "fft"])
def test_a_token_repeated_4096_times(implementation):
    """The state of a slow mode is the sum of thousands of almost equal terms."""
    sizes = dict(B=1, T=4096, H=2, N=3)
    inputs = shapes.example("diagonal_ssm", sizes)
    inputs["u"][:] = 0.1
    inputs["log_rate"] = np.float32([-9, -7, 0])
    inputs["log_frequency"] = np.float32([-8, -3, 1])
    against_reference(inputs, implementation=implementation)


def test_documents_over_several_blocks():
    """A row has two blocks, whole chunks and a rest; documents end inside a chunk, at its edge, or after many."""
    sizes = dict(B=2, T=2 * xla.BLOCK_TOKENS + 70, H=2, N=3)
    documents = cases.documents(sizes, 5, 64, xla.BLOCK_TOKENS, 1000)
    inputs, state = shapes.example("diagonal_ssm", sizes), cases.random_state("diagonal_ssm", sizes)
    inputs["log_rate"], inputs["log_frequency"] = np.float32([-4, -3, 0]), np.float32([-8, -3, 1])
    against_reference(inputs, state=state, segment_ids=documents)


def test_a_slow_mode_does_not_drift_in_steps():
    """Decodes 20k tokens with a mode that remembers 10k; rounding e^Lambda alone would cause an error of 3e-4."""
    sizes = dict(B=1, T=20_000, H=2, N=2)
    inputs = shapes.example("diagonal_ssm", sizes)
    inputs["log_rate"], inputs["log_frequency"] = np.float32([-9.2, -9.2]), np.float32([-20, -8])
    u, *system = (jnp.asarray(x) for x in inputs.values())

    @jax.jit
    def decode(u):
        def advance(state, u_BH):
            y_BH, state = mk.diagonal_ssm_step(u_BH, *system, state)
            return state, y_BH

        zero = jnp.zeros((1, 2, 2))
        state, y = jax.lax.scan(advance, (zero, zero), jnp.moveaxis(u, 1, 0))
        return jnp.moveaxis(y, 0, 1), state

    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in inputs.items()}
        wanted = jax.tree.map(np.asarray, jax.jit(partial(cases.diagonal_ssm, implementation="reference"))(wide))
    assert max(cases.relative_errors(decode(u), wanted).values()) < 1e-5


def test_the_future_changes_no_bit():
    inputs = shapes.example("diagonal_ssm", "ragged")
    other = inputs | {"u": inputs["u"].copy()}
    other["u"][:, 40:] *= 1e6
    (y, _), (other_y, _) = mk.diagonal_ssm(**inputs), mk.diagonal_ssm(**other)
    np.testing.assert_array_equal(y[:, :40], other_y[:, :40])


@pytest.mark.parametrize("implementation", ["xla", "fft"])
def test_memory_holds_no_state_per_token(implementation):
    """The scratch memory of the gradient is less than a third of that of all states, T x H x N complex numbers."""
    sizes = dict(B=1, T=4096, H=32, N=64)
    inputs = shapes.example("diagonal_ssm", sizes)
    loss = lambda inputs: jnp.sum(mk.diagonal_ssm(**inputs, implementation=implementation)[0])
    memory = jax.jit(jax.grad(loss)).lower(inputs).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 8 * 4096 * 32 * 64 / 3


def test_dtypes():
    inputs = shapes.example("diagonal_ssm", "tiny")
    u, *system = (jnp.asarray(x, jnp.bfloat16 if name == "u" else None) for name, x in inputs.items())
    (y, final), gradients_of = jax.vjp(mk.diagonal_ssm, u, *system)
    assert (y.dtype, *(x.dtype for x in final)) == (jnp.bfloat16, jnp.float32, jnp.float32)
    assert [g.dtype for g in gradients_of((y, final))] == [jnp.bfloat16] + 5 * [jnp.float32]
