"""How a kernel is called on a mesh: every device on its own rows and heads."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_kernels import partition


@pytest.fixture
def mesh(monkeypatch):
    monkeypatch.setattr(partition, "_axes", {"B": ("data", "fsdp"), "H": ("tensor",), "T": ()})
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 3)


def call(mesh, shapes, *, seen):
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]

    def kernel(x_BTH, lam_H):
        seen.append((x_BTH.shape, lam_H.shape))
        return (jnp.cumsum(x_BTH, axis=1) * lam_H,)

    run = jax.jit(lambda *arrays: partition.partitioned(kernel, arrays, axes=("BTH", "H"), results=("BTH",))[0])
    with jax.set_mesh(mesh):
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
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(jax.grad(loss))(x_BTH), jnp.cos(x_BTH), rtol=1e-5)


@pytest.mark.parametrize("letter, size, held", [("B", 8, 2), ("B", 6, 6), ("H", 6, 3), ("H", 5, 5)])
def test_what_a_device_holds(mesh, letter, size, held):
    """All of it where the devices do not divide it."""
    assert partition.on_a_device(letter, size) == size
    with jax.set_mesh(mesh):
        assert partition.on_a_device(letter, size) == held


def test_without_a_mesh_or_its_axes_the_kernel_gets_everything(mesh, monkeypatch):
    run = lambda: partition.partitioned(lambda x: (x.shape[0],), [jnp.ones((4, 2))], axes=["BH"], results=["B"])[0]
    assert run() == 4
    monkeypatch.setattr(partition, "_axes", {"B": (), "H": (), "T": ()})
    with jax.set_mesh(mesh):
        assert run() == 4
