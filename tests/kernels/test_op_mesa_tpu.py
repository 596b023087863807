"""Mesa composed of Mosaic TPU kernels: in both interpreters, and compiled for each chip by the TPU compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels import MESA_SOLUTION, mesh_axes
from mesanet_kernels.linear_recurrence.chunks import ChunkWeights
from mesanet_kernels.ops.mesa import pallas_tpu, solve_tpu
from mesanet_kernels.shapes import WIDE, example
from tests.helpers.mesa_systems import HEADS, KEYS, systems
from tests.helpers.op_cases import against_float64, assert_close, evaluate, mesa, relative_errors, rounded, while_loops
from tests.kernels.test_op_tpu import compiler_topology

LIMIT = 5e-3  # with bfloat16 inputs (docs/kernels.md, "Public functions")
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")
INPUTS = tuple(example("mesa", dict(B=1, T=1, H=1, K=1, V=1)))


def interpret(monkeypatch, how):
    """Runs the kernels in an interpreter; `how` is True (lenient) or `STRICT`."""
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=how))


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, True)


def arguments_of(keys, size):
    """Returns the solver's arguments for the systems of mesa_systems.py, one chunk per head, and the solutions."""
    arrays, exact_HCK = systems(keys, size, chunk=pallas_tpu.CHUNK, half=jnp.bfloat16)
    unit_HCK, k_HCK, high_HKK, low_HKK, intra_HCC, enter_HC, lam_HK = arrays
    assert len(unit_HCK) == HEADS
    rows = lambda x_HCK: jnp.swapaxes(x_HCK, 0, 1)[None]
    weights = ChunkWeights(intra_HCC[None, None], enter_HC[None, None])
    state_HKK = high_HKK.astype(jnp.float32) + low_HKK.astype(jnp.float32)
    return (rows(unit_HCK), rows(k_HCK), weights, lam_HK, state_HKK[None]), rows(exact_HCK)


@pytest.mark.parametrize("keys", KEYS)
def test_solves(keys, interpreted):
    """Easy systems and those that are hard in bfloat16, to a tenth of the error allowed with bfloat16 inputs."""
    arguments, exact_BTHK = arguments_of(keys, 64)
    x_BTHK, state_BHKK, iterations = jax.jit(partial(solve_tpu.solve_systems_tpu, max_iters=30, tol=0.0))(*arguments)
    assert np.linalg.norm(x_BTHK - exact_BTHK) < 5e-4 * np.linalg.norm(exact_BTHK)
    assert iterations.max() <= 30
    _, k_BTHK, (intra_NBHCC, enter_NBHC), _, entering_BHKK = (jax.tree.map(np.float64, x) for x in arguments)
    added_BHKK = np.einsum("bhs,bshk,bshl->bhkl", intra_NBHCC[0, ..., -1, :], k_BTHK, k_BTHK)
    np.testing.assert_allclose(state_BHKK, enter_NBHC[0, ..., -1, None, None] * entering_BHKK + added_BHKK, atol=1e-4)

    x_BTHK, _, fewer = jax.jit(partial(solve_tpu.solve_systems_tpu, max_iters=30, tol=1e-3))(*arguments)
    assert (fewer <= iterations).all() and fewer.mean() < iterations.mean()
    assert np.linalg.norm(x_BTHK - exact_BTHK) < 1e-2 * np.linalg.norm(exact_BTHK)


@pytest.mark.parametrize(
    "how, value_size", [pytest.param(True, 128, marks=pytest.mark.slow), (STRICT, 64)], ids=["lenient", "strict"]
)
def test_outputs_and_gradients(monkeypatch, how, value_size):
    """Two chunks, the last incomplete; one document starts inside the first chunk, one with the second chunk."""
    interpret(monkeypatch, how)
    found, wanted = against_float64(mesa, "pallas_tpu", dict(B=1, T=200, H=2, K=64, V=value_size), 20, 128)
    assert_close(found, wanted, limit=LIMIT)
    assert relative_errors(found[0], wanted[0])["[1][0]"] < 1e-6  # h_kk is exact


def test_one_key_repeated(interpreted):
    """With 600 equal keys, the last bits of a solution decide, because the states make them large again.

    States do not become larger with the cap on the decay (docs/mesa.md, "Numerics"). With two parts instead of three in
    the first iterations, errors would be 2e-2.
    """
    sizes = dict(B=1, T=600, H=1, K=64, V=64)
    gates = {"log_decay": np.zeros((1, 600, 1)), "beta": np.full((1, 600, 1), 0.9), "lam": np.full((1, 64), 0.25)}
    inputs = rounded(example("mesa", sizes) | {name: np.float32(x) for name, x in gates.items()})
    inputs["k"] = np.broadcast_to(inputs["k"][:, :1], inputs["k"].shape)
    found = evaluate(partial(mesa, implementation="pallas_tpu"), inputs, dtype=jnp.bfloat16)
    wanted = evaluate(partial(mesa, implementation="reference"), inputs, dtype=jnp.float64)
    assert_close(found, wanted, limit=LIMIT)


def test_says_what_it_does_not_support():
    run = partial(mesa, implementation="pallas_tpu")
    inputs = example("mesa", dict(B=1, T=8, H=1, K=64, V=64))
    with pytest.raises(NotImplementedError, match="'pallas_tpu' needs q, k and v in bfloat16"):
        run(inputs)
    with pytest.raises(NotImplementedError, match="'pallas_tpu' has no solver 'pcg'"):
        run(inputs, solver="pcg")
    narrow = example("mesa", dict(B=1, T=8, H=1, K=64, V=32))
    with pytest.raises(NotImplementedError, match="'pallas_tpu' needs key and value sizes in"):
        run({name: x if name in WIDE else jnp.asarray(x, jnp.bfloat16) for name, x in narrow.items()})


def abstract(sizes, device=None):
    """Returns the shapes and dtypes of Mesa's arguments."""
    sharding = device and jax.sharding.SingleDeviceSharding(device)
    dtype_of = lambda name: jnp.float32 if name in WIDE else jnp.bfloat16
    shapes = {name: x.shape for name, x in example("mesa", sizes).items()}
    return [jax.ShapeDtypeStruct(shape, dtype_of(name), sharding=sharding) for name, shape in shapes.items()]


def loss(*arrays, implementation="pallas_tpu"):
    o, state = mesa(dict(zip(INPUTS, arrays)), implementation=implementation)
    return sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in (o, *state))


def lowered(sizes, device, implementation):
    """The loss and its gradient, lowered for TPUs."""
    run = jax.value_and_grad(partial(loss, implementation=implementation), argnums=range(len(INPUTS)))
    return jax.jit(run).trace(*abstract(sizes, device)).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("length, kernels", [(128, 10), (127, 0)])
def test_is_chosen_on_tpus(length, kernels):
    """Ten kernels for a whole chunk, none for a shorter row, which goes to plain XLA.

    Forward: weights, solve, readout. Backward: weights, gradient of the readout, solve, two states, gradients,
    gradients of the weights.
    """
    text = lowered(dict(B=1, T=length, H=2, K=64, V=64), None, None).as_text()
    assert text.count("@tpu_custom_call") == kernels


def test_a_kept_solution_is_not_computed_again():
    """Counts the solves, each of two loops, when the forward pass is rematerialised."""
    arrays = abstract(dict(B=1, T=128, H=1, K=64, V=64))
    run = lambda *arrays: jnp.sum(jnp.sin(mesa(dict(zip(INPUTS, arrays)), implementation="pallas_tpu")[0]))

    def solves(policy):
        return while_loops(jax.make_jaxpr(jax.value_and_grad(jax.checkpoint(run, policy=policy)))(*arrays).jaxpr) / 2

    assert solves(jax.checkpoint_policies.nothing_saveable) == 3
    assert solves(jax.checkpoint_policies.save_only_these_names(MESA_SOLUTION)) == 2


def test_each_device_is_given_its_own_rows_and_heads(monkeypatch):
    """Checks the shapes that the kernels see, forward and backward."""
    axes = mesh_axes(batch=("data",), heads=("tensor",))
    arrays = abstract(dict(B=4, T=128, H=2, K=64, V=128))
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)), axes:
        program = jax.make_jaxpr(jax.grad(loss, argnums=range(len(INPUTS))))(*arrays)
    assert [x.shape for x in program.out_avals] == [x.shape for x in arrays]
    assert str(program).count("shard_map") == 2
    assert "f32[1,2,1,64,128]" in str(program)  # the states of one chunk: two of four rows, one of two heads


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize(
    "heads, key_size, value_size", [(8, 128, 128), (6, 128, 128), (5, 64, 64)], ids=["440m", "140m", "odd"]
)
def test_compiles(topology, heads, key_size, value_size):
    (device, *_) = compiler_topology(topology)
    lowered(dict(B=2, T=2048, H=heads, K=key_size, V=value_size), device, "pallas_tpu").compile()
