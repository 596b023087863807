"""Every op, forward and backward, compiles for TPUs, sharded over batch and heads, without gathering anything."""

import os
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding

from mesanet_kernels import mesh_axes, shapes
from tests.helpers import op_cases as cases
from tests.kernels.test_op_sharding import SPECS

SIZES = dict(B=4, T=512, H=4, J=4, K=128, V=128, D=256, W=4, N=64)


def compiler_topology(name):
    """Returns the devices of a TPU topology that exists only for the compiler."""
    sys.path.append(os.environ.get("MESANET_TPU_COMPILER", ""))  # `make test-all` installs it beside the environment
    pytest.importorskip("libtpu", reason="the TPU compiler is optional: `make test-all` installs it")
    for variable, value in (
        ("TPU_SKIP_MDS_QUERY", "1"),
        ("TPU_WORKER_HOSTNAMES", "localhost"),
        ("ALLOW_MULTIPLE_LIBTPU_LOAD", "1"),
    ):
        os.environ.setdefault(variable, value)
    return topologies.get_topology_desc(topology_name=name, platform="tpu").devices


@pytest.fixture(scope="module")
def tpu_mesh():
    devices = np.array(compiler_topology("v5e:2x2")).reshape(2, 2)
    return Mesh(devices, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.slow
@pytest.mark.parametrize("op", SPECS)
def test_compiles_for_v5e(op, tpu_mesh):
    inputs = shapes.example(op, {axis: SIZES[axis] for axis in shapes.SHAPES[op]["tiny"]})

    def abstract(name, x):
        dtype = jnp.bfloat16 if x.dtype == np.float32 and name not in shapes.WIDE else x.dtype
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=NamedSharding(tpu_mesh, SPECS[op][name]))

    arguments = {name: abstract(name, x) for name, x in inputs.items()}
    floating = {name: x for name, x in arguments.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    fixed = {name: x for name, x in arguments.items() if name not in floating}

    def loss(floating, fixed):
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves(cases.ALL[op](fixed | floating)))

    step = jax.jit(jax.grad(loss), out_shardings={name: x.sharding for name, x in floating.items()})
    axes = mesh_axes(batch=("data",), heads=("tensor",))
    with jax.sharding.use_abstract_mesh(tpu_mesh.abstract_mesh), axes:
        compiled = step.trace(floating, fixed).lower(lowering_platforms=("tpu",)).compile()
    moved = set(re.findall(r"\b(all-gather|all-to-all|collective-permute)", compiled.as_text()))
    assert not moved, moved
