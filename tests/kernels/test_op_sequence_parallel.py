"""Ops on rows that are split over devices along time: results equal those of one device, and little data is sent."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_kernels import mesh_axes, partition, sequence_parallel, shapes
from tests.helpers import op_cases as cases

SIZES = dict(B=2, T=256, H=4, J=2, K=8, V=16, D=12, W=4, N=8)
OPTIONS = {
    "mesa": dict(chunk_size=32, max_iters=4, tol=1e-3),
    "gated_linear_attention": dict(chunk_size=32),
    "gated_linear_attention_vector": dict(chunk_size=32),
    "delta_rule": dict(chunk_size=8),
    "mlstm": dict(chunk_size=8),
    "diagonal_ssm": dict(chunk_size=16),
    "softmax_cross_entropy": dict(block_size=48),
}
# Shards have 64 tokens. One document covers three of them, one starts with a shard, one lies inside a shard.
BOUNDARIES = (5, 192, 200, 230)


@pytest.fixture
def mesh():
    """Returns a function that makes a mesh of named sizes; the test runs with its axes declared to the kernels."""

    def make(**sizes):
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))

    with mesh_axes(batch=("data",), heads=("tensor",), time=("sequence",)):
        yield make


def program(op, options, sizes, *, boundaries=BOUNDARIES):
    """Returns (a function that computes an op's outputs, final state and all gradients, its arguments)."""
    inputs = shapes.example(op, {axis: sizes[axis] for axis in shapes.SHAPES[op]["tiny"]})
    fixed = {name: x for name, x in inputs.items() if not np.issubdtype(x.dtype, np.floating)}
    segments = op in cases.OVER_DOCUMENTS and boundaries
    fixed |= {"segment_ids": cases.documents(sizes, *boundaries)} if segments else {}
    state = {"state": cases.random_state(op, sizes)} if op in cases.RECURRENT else {}

    def call(changed, state, fixed):
        fixed = dict(fixed)
        segments = {name: fixed.pop(name) for name in ("segment_ids",) if name in fixed}

        def outputs(changed, state):
            return cases.ALL[op](fixed | changed, **segments, **state, **OPTIONS.get(op, {}), **options)

        y, gradients_of = jax.vjp(outputs, changed, state)
        flat, tree = jax.tree.flatten(y)
        cotangents = [jnp.asarray(c, x.dtype) for c, x in zip(cases.random_cotangents(flat), flat, strict=True)]
        return y, gradients_of(jax.tree.unflatten(tree, cotangents))

    changed = {name: x for name, x in inputs.items() if name not in fixed}
    return call, (changed, state, fixed)


def placed(tree, mesh, length):
    """Places the arrays of a tree: those with a time axis split over batch, time and heads, the others replicated."""

    def spec(x):
        rows = x.ndim > 1 and x.shape[1] == length and length % mesh.shape["sequence"] == 0
        names = ("data", "sequence", "tensor")[: x.ndim] if rows else ()
        return P(*(name if name in mesh.shape else None for name in names))

    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec(x))), tree)


def moved(compiled):
    """Returns, for each kind of collective, the largest number of elements that one of them sends to a device."""
    found = {}
    pattern = r"= (.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\("
    for result, kind in re.findall(pattern, compiled.as_text()):
        sizes = [math.prod(map(int, dims.split(","))) if dims else 1 for dims in re.findall(r"\[([\d,]*)\]", result)]
        found[kind] = max([found.get(kind, 0), *sizes])
    return found


def assert_equal_on(mesh, op, options=None, sizes=SIZES, **kwargs):
    call, arguments = program(op, options or {}, sizes, **kwargs)
    wanted = jax.jit(call)(*arguments)
    with jax.set_mesh(mesh):
        on_mesh = placed(arguments, mesh, sizes["T"])
        compiled = jax.jit(call).lower(*on_mesh).compile()
        got = compiled(*on_mesh)
    errors = cases.relative_errors(got, wanted)
    assert max(errors.values()) < 2e-5, errors
    return compiled


QUICK = ("delta_rule", "mlstm", "linear_scan", "attention")  # tests/training/test_sequence.py runs Mesa's layer
CASES = [
    *((op, {}) for op in QUICK),
    ("attention", {"window": 40}),
    *(pytest.param(op, {}, marks=pytest.mark.slow) for op in cases.ALL if op not in QUICK),
    pytest.param("mesa", {"solver": "pcg"}, marks=pytest.mark.slow),
    pytest.param("attention", {"window": 100}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("op, options", CASES)
def test_rows_over_four_devices(op, options, mesh):
    """Outputs and gradients are right, and only attention gathers anything of the length of a row."""
    compiled = assert_equal_on(mesh(sequence=4, tensor=2), op, options)
    sent = moved(compiled)
    if op == "attention":
        assert set(sent) == ({"collective-permute"} if options == {"window": 40} else {"all-gather"})
    else:
        assert set(sent) <= {"all-gather"}
        of_a_row = np.size(next(iter(program(op, options, SIZES)[1][0].values())))
        assert max(sent.values(), default=0) < of_a_row / 2


@pytest.mark.slow
@pytest.mark.parametrize("op", cases.ALL)
def test_batch_heads_and_time(op, mesh):
    assert_equal_on(mesh(data=2, sequence=2, tensor=2), op)


@pytest.mark.parametrize(
    "length, op",
    [(8, "causal_conv1d"), *(pytest.param(12, op, marks=pytest.mark.slow) for op in cases.OVER_DOCUMENTS)],
)
def test_shards_of_two_and_three_tokens(length, op, mesh):
    """The shards are shorter than the kernel of the convolution and any chunk; some documents have one token."""
    assert_equal_on(mesh(sequence=4), op, {}, SIZES | {"T": length}, boundaries=(1, 2, 4))


def test_row_that_the_devices_do_not_divide(mesh):
    assert_equal_on(mesh(sequence=4), "linear_scan", {}, SIZES | {"T": 54})


@pytest.mark.slow
def test_transforms(mesh):
    assert_equal_on(mesh(sequence=4), "diagonal_ssm", {"implementation": "fft"}, boundaries=())


@pytest.mark.slow
@pytest.mark.parametrize("op", cases.RECURRENT)
def test_half_precision(op, mesh):
    """With bfloat16 inputs, results are as accurate as on one device."""
    call, (changed, state, fixed) = program(op, {}, SIZES)
    wanted = jax.jit(call)(cases.rounded(changed), state, fixed)
    halves = cases.cast_floating(changed, jnp.bfloat16)
    with jax.set_mesh(mesh(sequence=4)):
        got = jax.jit(call)(halves, state, fixed)
    assert [x.dtype for x in jax.tree.leaves(got[1][0])] == [x.dtype for x in jax.tree.leaves(halves)]
    errors = cases.relative_errors(got[0], wanted[0])
    assert max(errors.values()) < 5e-3, errors


def test_kernel_inside_a_shard(mesh):
    """Inside `map_shards`, a kernel is called with each device's own rows, tokens and heads."""
    seen = []

    def kernel(x_BTH, lam_H):
        seen.append((x_BTH.shape, lam_H.shape))
        return (jnp.sin(x_BTH) * lam_H,)

    def on_shard(per_token, shared):
        return partition.partitioned(kernel, (*per_token, *shared), axes=("BTH", "H"), results=("BTH",))[0], ()

    def total(x_BTH, lam_H):
        y_BTH, _ = sequence_parallel.map_shards(on_shard, (x_BTH,), (lam_H,), axes=partition.time_axes(x_BTH.shape[1]))
        return jnp.sum(y_BTH)

    x_BTH, lam_H = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6, 4)), jnp.float32), 1.0 + jnp.arange(4)
    on_mesh = mesh(data=2, sequence=2, tensor=2)
    with jax.set_mesh(on_mesh):
        dx_BTH, dlam_H = jax.jit(jax.grad(total, argnums=(0, 1)))(*placed((x_BTH, lam_H), on_mesh, 6))
    assert set(seen) == {((2, 3, 2), (2,))}
    np.testing.assert_allclose(dx_BTH, jnp.cos(x_BTH) * lam_H, rtol=1e-5)
    np.testing.assert_allclose(dlam_H, jnp.sum(jnp.sin(x_BTH), axis=(0, 1)), rtol=1e-5)
