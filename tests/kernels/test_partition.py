"""A kernel on a mesh is called on each device with the device's own rows and heads."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_kernels import mesh_axes, partition

AXES = {"batch": ("data", "fsdp"), "heads": ("tensor",)}


@contextlib.contextmanager
def split(mesh):
    with jax.set_mesh(mesh), mesh_axes(**AXES):
        yield


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def call(mesh, shapes, *, seen):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def kernel(x_BTH, lam_H):
        seen.append((x_BTH.shape, lam_H.shape))
        return (jnp.cumsum(x_BTH, axis=1) * lam_H,)

    run = jax.jit(lambda *arrays: partition.partitioned(kernel, arrays, axes=("BTH", "H"), results=("BTH",))[0])
    with split(mesh):
        placed = [
            jax.device_put(arrays[0], jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor"))),
            jax.device_put(arrays[1], jax.NamedSharding(mesh, jax.P("tensor"))),
        ]
        y_BTH, hlo = run(*placed), run.lower(*placed).compile().as_text()
    np.testing.assert_allclose(y_BTH, np.cumsum(arrays[0], axis=1) * arrays[1], rtol=1e-5)
    return y_BTH.sharding, hlo


def test_rows_and_heads_are_split_and_nothing_moves(mesh):
    seen = []
    sharding, hlo = call(mesh, [(8, 5, 4), (4,)], seen=seen)
    assert seen[0] == ((2, 5, 2), (2,))
    assert sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P(("data", "fsdp"), None, "tensor")), 3)
    assert not re.search("all-|collective-permute", hlo)


def test_the_gradient_goes_through(mesh):
    def loss(x_BTH):
        return jnp.sum(partition.partitioned(lambda x: (jnp.sin(x),), [x_BTH], axes=["BTH"], results=["BTH"])[0])

    x_BTH = jnp.asarray(np.random.default_rng(1).standard_normal((4, 3, 2)), jnp.float32)
    with split(mesh):
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(x_BTH), jnp.cos(x_BTH), rtol=1e-5)


@pytest.mark.parametrize("letter, size, held", [("B", 8, 2), ("B", 6, 6), ("H", 6, 3), ("H", 5, 5)])
def test_size_on_a_device(mesh, letter, size, held):
    """A device holds everything if the devices do not divide the size."""
    assert partition.on_a_device(letter, size) == size
    with split(mesh):
        assert partition.on_a_device(letter, size) == held


def test_without_a_mesh_or_its_axes_the_kernel_gets_everything(mesh):
    def rows_of_a_call():
        return partition.partitioned(lambda x: (x.shape[0],), [jnp.ones((4, 2))], axes=["BH"], results=["B"])[0]

    assert rows_of_a_call() == 4
    with mesh_axes(**AXES):
        assert rows_of_a_call() == 4
    with jax.set_mesh(mesh):
        assert rows_of_a_call() == 4


def test_a_function_traced_under_other_axes_is_traced_again(mesh):
    """The axes belong to the trace: a module-level variable would leave the old ones in the cache of jit."""
    seen = []

    def kernel(x_BH):
        seen.append(x_BH.shape)
        return (x_BH + 1,)

    run = jax.jit(lambda x: partition.partitioned(kernel, [x], axes=["BH"], results=["BH"])[0])
    x_BH = jnp.zeros((8, 4))
    with jax.set_mesh(mesh):
        for axes, held in (({}, (8, 4)), (AXES, (2, 2)), ({"heads": ("tensor",)}, (8, 2))):
            with mesh_axes(**axes):
                np.testing.assert_array_equal(run(x_BH), 1)
            assert seen[-1] == held
        count = len(seen)
        with mesh_axes(**AXES):
            run(x_BH)
        assert len(seen) == count  # the first trace under these axes is still in the cache


def test_the_axes_reach_lowering_ahead_of_time_and_end_with_the_context(mesh):
    """`trace` and `lower` see the axes as a call does; after an error the axes are those from before."""
    seen = []

    def kernel(x_BH):
        seen.append(x_BH.shape)
        return (x_BH + 1,)

    run = jax.jit(lambda x: partition.partitioned(kernel, [x], axes=["BH"], results=["BH"])[0])
    x_BH = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    run.lower(x_BH)
    with pytest.raises(KeyError), split(mesh):
        run.lower(x_BH)
        traced = run.trace(x_BH)
        raise KeyError
    run.lower(x_BH)
    assert seen == [(8, 4), (2, 2)]
    assert "manual_computation" in traced.lower().as_text()  # lowered outside, traced inside
    with jax.set_mesh(mesh):
        assert partition.on_a_device("B", 8) == 8
