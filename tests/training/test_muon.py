"""Orthogonalisation approximates U V^T for each matrix, in stacks and trees of any shape, and on a mesh.

L layers, I inputs and O outputs of a matrix.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.training.muon import ITERATIONS, orthogonalize

AXES = ("embed", "mlp")
SHAPES = [(3, 24, 40), (3, 40, 24), (3, 32, 32)]
# Singular values span two orders of magnitude; five sweeps do not lift values below 1/100 of the norm to one.
BOUNDS = {"polar_express": (0.85, 1.15), "quintic": (0.65, 1.25)}


@partial(jax.jit, static_argnames=("iteration", "sweeps", "dtype"))
def orthogonal(x, *, iteration="polar_express", sweeps=5, dtype="float32"):
    return orthogonalize(x, AXES, iteration=iteration, sweeps=sweeps, dtype=jnp.dtype(dtype))


def matrices(shape, *, spread=100.0, seed=0):
    """Returns (U, singular values, V^T) in float64; the singular values go from 1 to 1/spread."""
    u, _, vt = np.linalg.svd(np.random.default_rng(seed).standard_normal(shape), full_matrices=False)
    return u, np.geomspace(1, 1 / spread, min(shape[-2:])), vt


@pytest.mark.parametrize("iteration", ITERATIONS)
@pytest.mark.parametrize(("dtype", "off_diagonal"), [("float32", 2e-5), ("bfloat16", 0.1)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_singular_values_become_one(iteration, dtype, off_diagonal, shape):
    u, s, vt = matrices(shape)
    found = np.asarray(orthogonal(jnp.asarray(u * s @ vt, jnp.float32), iteration=iteration, dtype=dtype))
    assert found.dtype == np.float32 and found.shape == shape
    inner = u.mT @ found @ vt.mT  # diagonal, since the singular vectors do not change
    values = np.diagonal(inner, axis1=-2, axis2=-1)
    low, high = BOUNDS[iteration]
    slack = 0.05 if dtype == "bfloat16" else 0
    assert low - slack < values.min() and values.max() < high + slack, (values.min(), values.max())
    assert np.abs(inner - values[..., None] * np.eye(len(s))).max() < off_diagonal


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_stack_equals_its_matrices_for_every_scale_and_shape(shape):
    u, s, vt = matrices(shape)
    x_LIO = jnp.asarray(u * s @ vt, jnp.float32)
    wanted_LIO = np.asarray(orthogonal(x_LIO))
    alone_LIO = np.stack([orthogonal(x_IO) for x_IO in x_LIO])
    np.testing.assert_allclose(alone_LIO, wanted_LIO, atol=1e-5)
    np.testing.assert_allclose(orthogonal(x_LIO * jnp.array([1e3, 1.0, 30.0])[:, None, None]), wanted_LIO, atol=1e-4)
    np.testing.assert_allclose(orthogonal(x_LIO.mT).mT, wanted_LIO, atol=1e-5)


def test_a_tree_equals_its_matrices():
    """Matrices of the same shape are stacked, with any leading axes; the tree keeps its structure."""
    shapes = {"a": (2, 16, 24), "b": (24, 16), "c": {"d": (16, 24), "e": (2, 2, 16, 24), "f": (24, 16)}}
    rng = np.random.default_rng(0)

    def random(shape):
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    tree = jax.tree.map(random, shapes, is_leaf=lambda x: isinstance(x, tuple))
    axes = {"a": AXES, "b": AXES, "c": {"d": AXES, "e": AXES, "f": ("mlp", "embed")}}
    found = jax.jit(lambda tree: orthogonalize(tree, axes, iteration="quintic", sweeps=5, dtype=jnp.float32))(tree)
    for x, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        np.testing.assert_allclose(x, orthogonal(wanted, iteration="quintic"), atol=1e-5)


def test_more_sweeps_use_the_last_coefficients():
    u, s, vt = matrices((1, 24, 40), spread=1e4)
    x = jnp.asarray(u * s @ vt, jnp.float32)
    error = [float(jnp.abs(orthogonal(x, sweeps=sweeps) - u @ vt).max()) for sweeps in (5, 8)]
    assert error[1] < error[0] / 2, error


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (1, 8, 1)], ids=str)
@pytest.mark.parametrize("axes", [("embed", "mlp"), ("heads", "embed"), (None, "heads")], ids=str)
@pytest.mark.parametrize("layers", [6, 8])
def test_on_a_mesh_each_device_computes_whole_layers(sizes, axes, layers):
    """Matrices are exchanged by all-to-all, not gathered, and no product is summed over devices."""
    mesh = mesh_lib.make_mesh(sizes)
    x_LIO = jnp.asarray(np.random.default_rng(0).standard_normal((layers, 64, 96)), jnp.float32)
    split = jax.NamedSharding(mesh, mesh_lib.partition_spec(axes, x_LIO.shape, mesh))
    call = lambda x: orthogonalize(x, axes, iteration="polar_express", sweeps=5, dtype=jnp.float32)
    with mesh_lib.use_mesh(mesh):
        compiled = jax.jit(call, in_shardings=split, out_shardings=split).lower(x_LIO).compile()
        found_LIO = np.asarray(compiled(jax.device_put(x_LIO, split)))
    np.testing.assert_allclose(found_LIO, orthogonal(x_LIO), atol=1e-5)
    program = compiled.as_text()
    shapes_of = lambda op: [
        tuple(map(int, shape.split(","))) for shape in re.findall(rf"= \(?f32\[([\d,]+)\].* {op}\(", program)
    ]
    assert all(len(shape) == 1 for shape in shapes_of("all-reduce")), "only norms are summed over devices"
    ways = np.prod([mesh.shape[axis] for axis in split.spec if axis])
    part = (layers + mesh.size) * 64 * 96 / ways  # the elements of a parameter that a device holds, with padding
    assert all(np.prod(shape) <= part for shape in shapes_of("all-gather")), (
        "only results are gathered, by devices that hold copies"
    )
    shared = mesh.size if mesh.size <= layers else ways
    stacks = [shape[0] for shape in shapes_of("dot") if len(shape) == 3]
    assert all(stack <= -(-layers // shared) for stack in stacks), stacks
    assert len(shapes_of("dot")) == 3


def test_zero_gradients_have_zero_directions():
    assert not np.any(orthogonal(jnp.zeros((2, 8, 16))))
