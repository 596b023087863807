"""Mesa's solve as a Mosaic TPU kernel: in both interpreters, and compiled for each chip by the TPU compiler."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from mesa_systems import HEADS, KEYS, systems
from op_cases import against_float64, assert_close, mesa
from test_op_tpu import compiler_topology

from mesanet_kernels.ops.mesa import pallas_tpu

systems_of = partial(systems, chunk=pallas_tpu.CHUNK, half=pallas_tpu.HALF)
STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.mark.parametrize("interpret", [True, STRICT], ids=["lenient", "strict"])
@pytest.mark.parametrize("keys", KEYS)
def test_kernel_solves(keys, interpret):
    """Also the systems that are hard for bfloat16: 5e-4 is a tenth of what bfloat16 inputs are allowed (kernel-api.md)."""
    arrays, exact_RCK = systems_of(keys, 64)
    x_RCK, iterations_RC = pallas_tpu._kernel(*arrays, max_iters=30, tol=0.0, interpret=interpret)
    assert np.linalg.norm(x_RCK - exact_RCK) < 5e-4 * np.linalg.norm(exact_RCK)
    assert iterations_RC.max() <= 30
    x_RCK, fewer_RC = pallas_tpu._kernel(*arrays, max_iters=30, tol=1e-3, interpret=interpret)
    assert (fewer_RC <= iterations_RC).all() and fewer_RC.mean() < iterations_RC.mean()
    assert np.linalg.norm(x_RCK - exact_RCK) < 1e-2 * np.linalg.norm(exact_RCK)


def test_outputs_and_gradients(monkeypatch):
    """The op with its kernels, of the weights too; the last chunk is ragged, documents start inside a chunk and with one."""
    call = pl.pallas_call
    monkeypatch.setattr(pl, "pallas_call", lambda kernel, **options: call(kernel, **options | {"interpret": True}))
    sizes = dict(B=1, T=200, H=2, K=64, V=64)
    found, wanted = against_float64(mesa, "pallas_tpu", sizes, 20, 128)
    assert_close(found, wanted, limit=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("size", pallas_tpu.KEY_SIZES)
def test_kernel_compiles(topology, size):
    (device, *_) = compiler_topology(topology)
    sharding = jax.sharding.SingleDeviceSharding(device)
    arrays, _ = systems_of("random", size)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in arrays]
    run = jax.jit(partial(pallas_tpu._kernel, max_iters=30, tol=1e-4))
    run.trace(*shapes).lower(lowering_platforms=("tpu",)).compile()


def test_heads_of_a_step_divide_the_heads():
    """Three heads: one a step; the result does not depend on how many are interleaved."""
    arrays, _ = systems_of("random", 64)
    *arrays, lam_HK = arrays
    three = [jnp.concatenate([x, x[:1]]) for x in arrays]
    lam_3K = jnp.concatenate([lam_HK, lam_HK[:1]])
    run = partial(pallas_tpu._kernel, max_iters=4, tol=0.0, interpret=True)
    x_3CK, _ = run(*three, lam_3K)
    np.testing.assert_allclose(x_3CK[:HEADS], run(*arrays, lam_HK)[0], rtol=1e-6)
