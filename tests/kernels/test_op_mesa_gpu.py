"""Mesa composed of Mosaic GPU kernels: interpreted and lowered for CUDA on CPUs, and run where there is a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_kernels import MESA_SOLUTION, mesh_axes
from mesanet_kernels.ops.mesa import pallas_gpu, solve_gpu
from mesanet_kernels.shapes import example
from mesanet_kernels.tiles import gpu as tiles
from tests.helpers import op_cases
from tests.helpers.hopper import interpreted, lowers, needs_interpreter
from tests.helpers.mesa_systems import HEADS, KEYS, systems
from tests.helpers.op_cases import (
    assert_close,
    cast_floating,
    evaluator,
    gated_linear_attention,
    mesa,
    rounded,
    while_loops,
)

LIMIT = 5e-3  # with bfloat16 inputs (docs/kernels.md, "Public functions")
against_float64 = partial(op_cases.against_float64, mesa, "pallas_gpu")


def solved(keys, size, **options):
    """Returns the kernel's solutions of the systems of mesa_systems.py, the exact ones, and the iterations."""
    arrays, exact_HCK = systems(keys, size, chunk=tiles.CHUNK, half=jnp.float16)
    unit_HCK, k_HCK, high_HKK, low_HKK, intra_HCC, enter_HC, lam_HK = arrays
    assert len(unit_HCK) == HEADS
    rows = lambda x_HCK: jnp.swapaxes(x_HCK, 0, 1)[None].astype(jnp.bfloat16)
    chunk = lambda x: x[None, None]
    diagonal_HK = jnp.diagonal(high_HKK, axis1=-2, axis2=-1).astype(jnp.float32)
    run = jax.jit(partial(solve_gpu.solve_systems_gpu, **options))
    x_parts, iterations_NBHC = run(
        (rows(unit_HCK),),
        rows(k_HCK),
        (chunk(high_HKK), chunk(low_HKK)),
        chunk(diagonal_HK),
        chunk(intra_HCC),
        chunk(enter_HC),
        lam_HK,
    )
    x_BTHK = sum(np.float64(part) for part in x_parts)
    return x_BTHK[0].swapaxes(0, 1), exact_HCK, iterations_NBHC


def error(keys, size, **options):
    """Returns the relative error of the kernel's solutions and the mean number of iterations."""
    x_HCK, exact_HCK, iterations = solved(keys, size, **options)
    return np.linalg.norm(x_HCK - exact_HCK) / np.linalg.norm(exact_HCK), iterations.mean()


@needs_interpreter
@pytest.mark.parametrize("keys", KEYS)
def test_solves(monkeypatch, keys):
    """Easy systems and those that are hard in float16, to a tenth of the error allowed with bfloat16 inputs."""
    with interpreted(monkeypatch):
        all_steps, steps = error(keys, 64, max_iters=30, tol=0.0)
        stopped, fewer = error(keys, 64, max_iters=30, tol=1e-3)
    assert all_steps < 5e-4 and steps <= 30
    assert stopped < 1e-2 and fewer < steps


@needs_interpreter
def test_outputs_and_gradients(monkeypatch):
    """Three chunks, the last incomplete; one document starts inside the first chunk, one with the second chunk."""
    with interpreted(monkeypatch):
        found, wanted = against_float64(dict(B=1, T=150, H=2, K=64, V=64), 20, 64)
    assert_close(found, wanted, limit=LIMIT)


@needs_interpreter
def test_solutions_in_two_parts(monkeypatch):
    """Keys of low rank that are hardly forgotten need solutions in two parts; with one, the error would be 4e-2."""
    sizes = dict(B=1, T=320, H=1, K=64, V=64)
    rng = np.random.default_rng(0)
    keys = rng.standard_normal((320, 6)) @ rng.standard_normal((6, 64)) + 0.1 * rng.standard_normal((320, 64))
    gates = {"log_decay": np.full((1, 320, 1), -1e-3), "beta": np.full((1, 320, 1), 0.9), "lam": np.full((1, 64), 0.25)}
    hard = gates | {"k": (keys / np.linalg.norm(keys, axis=-1, keepdims=True))[None, :, None]}
    inputs = rounded(example("mesa", sizes) | {name: np.float32(x) for name, x in hard.items()})
    run = lambda x, name: mesa(x, implementation=name)[0]
    with jax.enable_x64(True):
        wanted = np.asarray(run({name: jnp.float64(x) for name, x in inputs.items()}, "reference"))
    halves = cast_floating(inputs, jnp.bfloat16)
    with interpreted(monkeypatch):
        found = jax.jit(partial(run, name="pallas_gpu"))(halves)
    assert np.linalg.norm(np.float64(found) - wanted) < LIMIT * np.linalg.norm(wanted)


def test_scales_keep_large_states_within_float16():
    """With keys of norm 240 for 192 tokens, H exceeds float16; the scaled states do not, and are the same H."""
    rng = np.random.default_rng(0)
    k_BTHK = jnp.asarray(30 * rng.standard_normal((1, 192, 1, 64)), jnp.bfloat16)
    leave_NBHC, carry_NBH, state = np.ones((3, 1, 1, 64)), np.full((3, 1, 1), 0.9), np.eye(64)[None, None]
    weights, carry, first, scales = pallas_gpu.scaled_recurrence(k_BTHK, leave_NBHC, carry_NBH, state)
    scaled = first
    for n in range(3):
        k_CK = np.float64(k_BTHK[0, 64 * n : 64 * n + 64, 0])
        scaled = carry[n, ..., None, None] * scaled + (k_CK * weights[n, 0, 0][:, None]).T @ k_CK
        state = carry_NBH[n] * state + k_CK.T @ k_CK
        assert abs(scaled).max() < jnp.finfo(jnp.float16).max < abs(state).max()
        np.testing.assert_allclose(scaled * scales[n + 1, ..., None, None], state, rtol=1e-5, atol=1e-5 * state.max())


@pytest.mark.parametrize("size", tiles.SIZES)
def test_lowers_for_cuda(monkeypatch, size):
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    inputs = cast_floating(example("mesa", dict(B=1, T=150, H=2, K=size, V=size)), jnp.bfloat16)
    arrays = inputs.values()

    def loss(*arrays):
        o, state = mesa(dict(zip(inputs, arrays)), implementation="pallas_gpu")
        return sum(jnp.sum(x) for x in (o, *state))

    assert lowers(jax.grad(loss, argnums=range(6)), *arrays)


@pytest.mark.parametrize("op", [mesa, gated_linear_attention])
def test_each_device_is_given_its_own_rows_and_heads(monkeypatch, op):
    """Checks the shapes that the kernels see, forward and backward."""
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    axes = mesh_axes(batch=("data",), heads=("tensor",))
    inputs = cast_floating(example(op.__name__, dict(B=4, T=64, H=2, K=64, V=128)), jnp.bfloat16)
    arrays = inputs.values()

    def loss(*arrays):
        o, _ = op(dict(zip(inputs, arrays)), implementation="pallas_gpu")
        return jnp.sum(o)

    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)), axes:
        program = jax.make_jaxpr(jax.grad(loss, argnums=range(len(arrays))))(*arrays)
    assert [x.shape for x in program.out_avals] == [x.shape for x in arrays]
    assert str(program).count("shard_map") == 2
    assert "bf16[1,2,1,64,128]" in str(program)  # the states of one chunk: two of four rows, one of two heads


@pytest.mark.parametrize("ways", [1, 2])
def test_a_kept_solution_is_not_computed_again(monkeypatch, ways):
    """Counts the solves, each a loop, when the forward pass is rematerialised, on one device and on a mesh."""
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    axes = mesh_axes(batch=("data",), heads=())
    inputs = cast_floating(example("mesa", dict(B=2, T=64, H=1, K=64, V=64)), jnp.bfloat16)
    arrays = inputs.values()

    def solves(policy):
        run = lambda *arrays: jnp.sum(jnp.sin(mesa(dict(zip(inputs, arrays)), implementation="pallas_gpu")[0]))
        return while_loops(jax.make_jaxpr(jax.value_and_grad(jax.checkpoint(run, policy=policy)))(*arrays).jaxpr)

    with jax.set_mesh(jax.make_mesh((ways,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))), axes:
        assert solves(jax.checkpoint_policies.nothing_saveable) == 3
        assert solves(jax.checkpoint_policies.save_only_these_names(MESA_SOLUTION)) == 2


def test_says_what_it_does_not_support():
    inputs = example("mesa", dict(B=1, T=64, H=1, K=64, V=64))
    with pytest.raises(NotImplementedError, match="'pallas_gpu' needs q, k and v in bfloat16"):
        mesa(inputs, implementation="pallas_gpu")
    with pytest.raises(NotImplementedError, match="'pallas_gpu' has no solver 'pcg'"):
        mesa(inputs, implementation="pallas_gpu", solver="pcg")


@pytest.mark.gpu
@pytest.mark.parametrize("key_size", tiles.SIZES)
@pytest.mark.parametrize("value_size", tiles.SIZES)
def test_accuracy_on_a_gpu(key_size, value_size):
    found, wanted = against_float64(dict(B=2, T=200, H=3, K=key_size, V=value_size), 70, 131)
    assert_close(found, wanted, limit=LIMIT)


@pytest.mark.gpu
@pytest.mark.parametrize("size", tiles.SIZES)
@pytest.mark.parametrize("keys", KEYS)
def test_solves_on_a_gpu(keys, size):
    assert error(keys, size, max_iters=30, tol=0.0)[0] < 2e-3


@pytest.mark.gpu
def test_a_solution_that_all_layers_keep_is_computed_once_on_a_gpu():
    """The compiler must not repeat a kernel whose result two others read (`tiles.kernel`)."""
    x = cast_floating(example("mesa", dict(B=1, T=128, H=2, K=64, V=64)), jnp.bfloat16)

    def layer(v, _):
        return v + mesa(x | {"q": v, "v": v}, implementation="pallas_gpu")[0], None

    keep = jax.checkpoint_policies.save_only_these_names(MESA_SOLUTION)
    layers = lambda v: jnp.sum(jax.lax.scan(jax.checkpoint(layer, policy=keep), v, length=3)[0] ** 2)
    program = jax.jit(jax.grad(layers)).lower(x["v"]).compile().as_text()
    calls = [line for line in program.splitlines() if "custom-call(" in line and "solve_chunk" in line]
    assert len(calls) == 2, calls  # once in the forward and once in the backward pass


@pytest.mark.gpu
def test_the_default_is_the_kernel_on_a_gpu():
    inputs = rounded(example("mesa", dict(B=1, T=128, H=2, K=64, V=64)))
    run = lambda name: evaluator(partial(mesa, implementation=name), dtype=jnp.bfloat16)(inputs)
    jax.tree.map(np.testing.assert_array_equal, run(None), run("pallas_gpu"))


@pytest.mark.gpu
def test_gradients_do_not_depend_on_the_cotangents_scale_on_a_gpu():
    inputs = rounded(example("mesa", dict(B=1, T=128, H=2, K=128, V=128)))
    run = evaluator(lambda x: mesa(x)[0], dtype=jnp.bfloat16)
    cotangent = np.random.default_rng(5).standard_normal(inputs["v"].shape).astype(np.float32)
    one, small = (run(inputs, cotangents=[scale * cotangent])[1][0] for scale in (1.0, 2.0**-30))
    for name, gradient in one.items():
        np.testing.assert_allclose(
            small[name] * 2.0**30, gradient, rtol=0, atol=1e-2 * np.abs(gradient).max(), err_msg=name
        )
