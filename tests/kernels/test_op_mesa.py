"""What only Mesa has: golden values, the properties of its solver, and the scale of its implicit gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from mesanet_kernels.ops.mesa.solver import conjugate_gradients, preconditioned_conjugate_gradients
from tests.helpers import op_cases as cases

NAMES = dict(q="q", k="k", v="v", g="log_decay", beta="beta", lamb="lam")
GOLDEN = sorted(cases.GOLDEN.glob("mesa_*.npz"))


@functools.cache
def golden_runner(implementation, solver, dtype):
    def call(inputs, state):
        options = dict(max_iters=20, implementation=implementation, solver=solver)
        o, final_state = cases.mesa(inputs, state=state, **options)
        return o, jax.lax.stop_gradient(final_state)

    return cases.evaluator(call, dtype=dtype)


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "implementation, solver, dtype, limit",
    [("reference", "cg", jnp.float64, 1e-12), ("xla", "cg", None, 1e-4), ("xla", "pcg", None, 1e-4)],
)
def test_golden(path, implementation, solver, dtype, limit):
    """Values of a public implementation in float64. T = 150 is not a multiple of the chunk; 20 iterations suffice."""
    data = np.load(path)
    inputs = {name: data["in_" + key] for key, name in NAMES.items()}
    zeros = np.zeros(data["out_final_kk"].shape, np.float32), np.zeros(data["out_final_kv"].shape, np.float32)
    with_state = "in_h_kk" in data
    outputs, (gradients, dstate) = golden_runner(implementation, solver, dtype)(
        inputs,
        state=(data["in_h_kk"], data["in_h_kv"]) if with_state else zeros,
        cotangents=[data["cotangent_o"], *zeros],
    )

    wanted = {name: data["grad_" + key] for key, name in NAMES.items()}
    errors = cases.relative_errors(
        (outputs, gradients), ((data["out_o"], (data["out_final_kk"], data["out_final_kv"])), wanted)
    )
    if with_state:
        errors |= cases.relative_errors(
            dict(zip(("dh_kk", "dh_kv"), dstate)), dict(dh_kk=data["grad_h_kk"], dh_kv=data["grad_h_kv"])
        )
    assert len(GOLDEN) == 7 and max(errors.values()) < limit, errors


@pytest.mark.parametrize("solver", ["cg", "pcg"])
def test_gradients_scale_with_the_cotangent(solver):
    inputs = shapes.example("mesa", "tiny")
    sizes = shapes.SHAPES["mesa"]["tiny"]
    cotangent = np.random.default_rng(0).standard_normal(inputs["v"].shape).astype(np.float32)
    states = [np.zeros((sizes["B"], sizes["H"], sizes["K"], size), np.float32) for size in (sizes["K"], sizes["V"])]
    run = cases.evaluator(functools.partial(cases.mesa, solver=solver))

    def gradients(scale):
        return run(inputs, cotangents=[np.float32(scale) * cotangent, *states])[1][0]

    for scale in (1e-8, 1e-25):
        unscaled = {name: x.astype(np.float64) / scale for name, x in gradients(scale).items()}
        errors = cases.relative_errors(unscaled, gradients(1))
        assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize("solver", ["cg", "pcg"])
def test_repeated_token_stays_finite_and_solved(solver):
    """2048 equal keys that are never forgotten have the worst condition number (docs/mesa.md, "Numerics").

    The keys are also the values, so o is H q*, and the error of o is the residual of the system, relative to a query of
    unit norm. Other values would cancel in the readout, which would measure the rounding of float32 and not the solver.
    """
    sizes = dict(B=1, T=2048, H=1, K=16, V=16)
    inputs = shapes.example("mesa", sizes)
    inputs["k"] = inputs["v"] = np.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    inputs["log_decay"], inputs["beta"] = np.zeros((1, 2048, 1), np.float32), np.ones((1, 2048, 1), np.float32)
    inputs["lam"] = np.full((1, 16), 0.25, np.float32)

    (o, (h_kk, _)), (gradients, _) = cases.evaluate(functools.partial(cases.mesa, solver=solver), inputs)
    assert all(np.all(np.isfinite(x)) for x in gradients.values())
    h_kk, q = h_kk[0, 0].astype(np.float64), inputs["q"][0, -1, 0]
    assert np.linalg.norm(o[0, -1, 0] - h_kk @ np.linalg.solve(h_kk + 0.25 * np.eye(16), q)) < 1e-3


def systems(*, rows=6, size=24, seed=0):
    rng = np.random.default_rng(seed)
    factors = rng.standard_normal((rows, size, size)).astype(np.float32) / size**0.5
    matrices = factors @ factors.swapaxes(1, 2) + 0.25 * np.eye(size, dtype=np.float32)
    return jnp.asarray(matrices), jnp.asarray(rng.standard_normal((rows, size)).astype(np.float32))


@functools.partial(jax.jit, static_argnames=("max_iters", "tol"))
def solve(matrices, rhs, inverse=None, **options):
    def times(matrices, x):
        return jnp.einsum("rij,rj->ri", matrices, x, precision="highest")

    operator = functools.partial(times, matrices)
    if inverse is None:
        return conjugate_gradients(operator, jnp.diagonal(matrices, axis1=1, axis2=2), rhs, **options)
    return preconditioned_conjugate_gradients(operator, functools.partial(times, inverse), rhs, **options)


def residuals(matrices, rhs, x):
    return np.linalg.norm(np.asarray(rhs, np.float64) - np.einsum("rij,rj->ri", np.float64(matrices), x), axis=-1)


def test_zero_steps_return_the_starting_point():
    matrices, rhs = systems()
    x, iterations = solve(matrices, rhs, max_iters=0, tol=0.0)
    np.testing.assert_allclose(x, rhs / jnp.diagonal(matrices, axis1=1, axis2=2), rtol=1e-6)
    assert np.all(iterations == 0)


def test_tolerance_stops_each_row_at_its_own_step():
    matrices, rhs = systems()
    matrices = matrices.at[0].set(2 * jnp.eye(24)).at[0, 0, 1].set(0.1).at[0, 1, 0].set(0.1)  # solved in few iterations
    start = residuals(matrices, rhs, solve(matrices, rhs, max_iters=0, tol=0.0).x_RK)
    for tol in (1e-1, 1e-3):
        x, iterations = solve(matrices, rhs, max_iters=50, tol=tol)
        assert np.all(residuals(matrices, rhs, x) <= 1.01 * tol * start)
        assert iterations[0] < iterations.max() < 50
        # The row stays as it was when it stopped, and one iteration less would not have been enough.
        row, steps = 0, int(iterations[0])
        np.testing.assert_array_equal(x[row], solve(matrices, rhs, max_iters=steps, tol=tol).x_RK[row])
        before = solve(matrices, rhs, max_iters=steps - 1, tol=0.0).x_RK
        assert residuals(matrices, rhs, before)[row] > tol * start[row]


@pytest.mark.parametrize("tol", [0.0, 1e-4])
def test_solver_is_scale_invariant_and_solves_zero(tol):
    matrices, rhs = systems()
    x, iterations = solve(matrices, rhs, max_iters=40, tol=tol)
    for exponent in (-60, 60):  # powers of two, so every bit must be the same
        scaled, scaled_iterations = solve(matrices, rhs * 2.0**exponent, max_iters=40, tol=tol)
        np.testing.assert_array_equal(scaled / 2.0**exponent, x)
        np.testing.assert_array_equal(scaled_iterations, iterations)
    assert np.all(solve(matrices, 0 * rhs, max_iters=40, tol=tol).x_RK == 0)


def test_converged_rows_are_refined():
    """With rank one plus a small diagonal, the starting point b / diag is far off; its rounding error must not stay."""
    key = np.full((1, 32), 32**-0.5, np.float32)
    matrices = jnp.asarray(200 * key[:, :, None] * key[:, None, :] + 0.25 * np.eye(32, dtype=np.float32))
    rhs = jnp.asarray(key)
    wanted = np.linalg.solve(np.float64(matrices), np.float64(rhs)[..., None])[..., 0]
    x, iterations = solve(matrices, rhs, max_iters=20, tol=0.0)
    assert np.linalg.norm(x - wanted) < 2e-5 * np.linalg.norm(wanted) and iterations[0] == 20


def test_iterations_of_the_layer():
    inputs = shapes.example("mesa", "ragged")
    run = jax.jit(functools.partial(mk.mesa, max_iters=30), static_argnames="tol")
    fixed, stopped = run(**inputs, tol=0.0), run(**inputs, tol=1e-4)
    assert fixed.iterations.dtype == jnp.int32 and np.all(fixed.iterations == 30)
    assert stopped.iterations.shape == (1, 70, 2) and 2 < stopped.iterations.mean() < 15
    assert np.linalg.norm(stopped.o - fixed.o) < 1e-3 * np.linalg.norm(fixed.o)


def test_an_exact_preconditioner_solves_in_one_step_and_a_near_one_in_few():
    matrices, rhs = systems()
    exact = jnp.linalg.inv(matrices)
    x, iterations = solve(matrices, rhs, exact, max_iters=20, tol=1e-4)
    assert np.all(iterations == 1) and np.all(residuals(matrices, rhs, x) < 1e-4 * np.linalg.norm(rhs, axis=-1))
    near = jnp.linalg.inv(matrices + 0.1 * jnp.eye(24))
    x, iterations = solve(matrices, rhs, near, max_iters=20, tol=1e-4)
    assert np.all(residuals(matrices, rhs, x) < 1.01e-4 * np.linalg.norm(rhs, axis=-1))
    assert iterations.max() < solve(matrices, rhs, max_iters=20, tol=1e-4).iterations_R.min()
    assert np.all(solve(matrices, 0 * rhs, near, max_iters=20, tol=1e-4).x_RK == 0)


def slow_heads(length=512, size=32, rank=4):
    """Returns inputs whose heads forget nothing and have keys of low rank, where the solver needs most iterations."""
    rng = np.random.default_rng(0)
    inputs = shapes.example("mesa", dict(B=1, T=length, H=2, K=size, V=size))
    unit = lambda x: (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)
    plane = rng.standard_normal((rank, size))
    for name in "qk":
        noise = 0.1 * rng.standard_normal((1, length, 2, size))
        inputs[name] = unit(rng.standard_normal((1, length, 2, rank)) @ plane + noise)
    inputs["log_decay"] = np.zeros_like(inputs["log_decay"])
    return inputs


def test_the_preconditioner_saves_most_steps_where_they_are_most():
    inputs = slow_heads()
    run = jax.jit(functools.partial(mk.mesa, max_iters=60), static_argnames=("tol", "solver"))
    exact = run(**inputs, tol=1e-7, solver="cg").o
    plain, bent = (run(**inputs, tol=1e-4, solver=solver) for solver in ("cg", "pcg"))
    assert bent.iterations.mean() < plain.iterations.mean() / 3
    # In the first chunk no state enters that all tokens share, so the preconditioner helps less there.
    assert bent.iterations[:, 64:].max() < plain.iterations.max() / 2
    assert np.linalg.norm(bent.o - exact) < 1e-3 * np.linalg.norm(exact)


def test_solvers_agree_over_documents_with_states_and_gradients():
    sizes = shapes.SHAPES["mesa"]["ragged"]
    inputs, state = shapes.example("mesa", sizes), cases.random_state("mesa", sizes)
    ids = cases.documents(sizes, 20, 41)
    run = lambda solver: cases.evaluate(
        functools.partial(cases.mesa, segment_ids=ids, solver=solver), inputs, state=state
    )
    cases.assert_close(run("pcg"), run("cg"), limit=2e-5)


def test_preconditioned_decoding_solves_a_token_in_one_step():
    """A token is a chunk of its own, so the preconditioner is the exact inverse."""
    sizes = shapes.SHAPES["mesa"]["tiny"]
    inputs, state = shapes.example("mesa", sizes), cases.random_state("mesa", sizes)
    token = {name: x if name == "lam" else x[:, 0] for name, x in inputs.items()}
    step = mk.mesa_step(**token, state=state, solver="pcg", tol=1e-5)
    assert np.all(step.iterations == 1)
    plain = mk.mesa_step(**token, state=state, max_iters=60, tol=1e-6)
    assert np.linalg.norm(step.o - plain.o) < 1e-4 * np.linalg.norm(plain.o)
