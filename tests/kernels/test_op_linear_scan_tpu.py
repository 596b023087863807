"""The Mosaic TPU kernel of the linear scan: in both interpreters, and compiled by the TPU compiler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from mesanet_kernels import shapes
from mesanet_kernels.ops.linear_scan import pallas_tpu, xla
from tests.kernels.test_op_tpu import compiler_topology

STRICT = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan", out_of_bounds_reads="raise")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("interpret", [True, STRICT], ids=["lenient", "strict"])
@pytest.mark.parametrize(
    "length, channels", [(1, 12), (70, 12), (300, 128), (512, 384)], ids=["token", "ragged", "blocks", "channels"]
)
def test_kernel_is_the_scan(length, channels, interpret, reverse):
    inputs = shapes.example("linear_scan", dict(B=2, T=length, D=channels))
    state_BD = np.random.default_rng(1).standard_normal((2, channels)).astype(np.float32)
    arrays = [jnp.asarray(x) for x in (inputs["x"], inputs["a"], state_BD)]
    h_BTD = pallas_tpu._kernel(*arrays, reverse=reverse, interpret=interpret)
    wanted_BTD = xla.scan(*arrays, reverse=reverse)
    assert np.linalg.norm(h_BTD - wanted_BTD) < 1e-6 * np.linalg.norm(wanted_BTD)


def test_error_names_what_is_unsupported():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="'pallas_tpu' has no float64"):
        x_BTD = jnp.zeros((1, 8, 8), jnp.float64)
        pallas_tpu.linear_scan_pallas_tpu(x_BTD, x_BTD, x_BTD[:, 0], jnp.zeros((1, 8), jnp.int32))


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("channels", [960, 1280])  # Hawk with 140M and with 440M parameters
def test_kernel_compiles(topology, channels):
    (device, *_) = compiler_topology(topology)
    sharding = jax.sharding.SingleDeviceSharding(device)
    wide = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    for reverse in (False, True):
        run = jax.jit(lambda *arrays: pallas_tpu._kernel(*arrays, reverse=reverse))  # noqa: B023
        shapes_ = wide(2, 2048, channels), wide(2, 2048, channels), wide(2, channels)
        run.trace(*shapes_).lower(lowering_platforms=("tpu",)).compile()
