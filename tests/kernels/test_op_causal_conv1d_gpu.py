"""The Mosaic GPU kernels of the convolution: in the GPU interpreter, lowered for CUDA, and on a GPU if there is one."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels import causal_conv1d, mesh_axes
from mesanet_kernels.ops.causal_conv1d import pallas_gpu
from mesanet_kernels.shapes import example
from mesanet_kernels.tiles import gpu as tiles
from tests.helpers.hopper import interpreted, lowers, needs_interpreter
from tests.helpers.op_cases import assert_close, documents, evaluate, evaluator, random_state, rounded


def against_reference(sizes, *, boundaries, dtype, limit, activation="silu"):
    """Compares outputs and gradients with the reference in float64.

    Returns:
      (the inputs, the results of the kernels, a function that computes the results for other inputs).
    """

    def run(inputs, state, name):
        ids = documents(sizes, *boundaries)
        options = dict(activation=activation, segment_ids=ids, initial_state=state)
        return causal_conv1d(**inputs, **options, implementation=name)

    inputs, state = rounded(example("causal_conv1d", sizes)), random_state("causal_conv1d", sizes)
    wanted = evaluate(partial(run, name="reference"), inputs, state=state, dtype=jnp.float64)
    kernels = partial(evaluator(partial(run, name="pallas_gpu"), dtype=dtype), state=state)
    found = kernels(inputs)
    assert_close(found, wanted, limit=limit)
    return inputs, found, kernels


@needs_interpreter
@pytest.mark.parametrize(
    "sizes, boundaries, activation",
    [
        (dict(B=1, T=21, D=200, W=3), (4, 15), None),  # one channel per thread
        (dict(B=1, T=34, D=384, W=8), (3, 17), "silu"),  # two channels per thread
        (dict(B=2, T=2, D=128, W=4), (1,), "silu"),  # fewer tokens than taps
    ],
)
def test_kernels_are_the_convolution(monkeypatch, sizes, boundaries, activation):
    """The last block of channels overlaps the one before; both write the same values, so this race is harmless."""
    monkeypatch.setattr(pallas_gpu, "BLOCK_TOKENS", 16)
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    with plgpu.force_gpu_interpret_mode():
        against_reference(sizes, boundaries=boundaries, dtype=jnp.float32, limit=1e-6, activation=activation)


@needs_interpreter
@pytest.mark.parametrize("dtype, limit", [(jnp.float32, 1e-6), (jnp.bfloat16, 5e-3)])
def test_documents_across_blocks_keep_apart(monkeypatch, dtype, limit):
    """The row has two whole blocks and a rest; NaN in one document does not reach any other document."""
    monkeypatch.setattr(pallas_gpu, "BLOCK_TOKENS", 16)
    sizes, start = dict(B=2, T=41, D=256, W=4), 18
    with interpreted(monkeypatch):
        inputs, found, run = against_reference(sizes, boundaries=(2, 15, start - 1), dtype=dtype, limit=limit)
        inputs["x"][1, :start] = np.nan
        ((y, _), (gradients, _)), ((spoilt_y, _), (spoilt, _)) = found, run(inputs)
    for whole, part in ((y, spoilt_y), (gradients["x"], spoilt["x"])):
        np.testing.assert_array_equal(part[0], whole[0])
        np.testing.assert_array_equal(part[1, start:], whole[1, start:])
        assert np.isnan(part[1, start - 1]).all()


def arguments(*, dtype, **sizes):
    inputs = [jnp.asarray(x, dtype) for x in example("causal_conv1d", sizes).values()]
    return *inputs, jnp.asarray(random_state("causal_conv1d", sizes), dtype)


def loss(x, w, bias, state):
    y, _ = causal_conv1d(x, w, bias, activation="silu", initial_state=state, implementation="pallas_gpu")
    return jnp.sum(y)


gradients = jax.grad(loss, argnums=range(4))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("channels", [255, 384])
def test_lowers_for_cuda(monkeypatch, dtype, channels):
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    inputs = arguments(dtype=dtype, B=2, T=300, D=channels, W=4)
    assert lowers(loss, *inputs)
    assert lowers(gradients, *inputs)


def test_each_device_gets_its_own_rows_and_channels(monkeypatch):
    """The shapes that the kernels get in both passes are those of one device."""
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    axes = mesh_axes(batch=("data",), heads=("tensor",))
    inputs = arguments(dtype=jnp.bfloat16, B=4, T=130, D=256, W=4)
    with jax.set_mesh(jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)), axes:
        program = jax.make_jaxpr(gradients)(*inputs)
        with pytest.raises(NotImplementedError, match="'pallas_gpu' needs at least 128 channels on a device"):
            loss(*arguments(dtype=jnp.bfloat16, B=4, T=130, D=254, W=4))
    assert [x.shape for x in program.out_avals] == [x.shape for x in inputs]
    assert str(program).count("shard_map") == 2
    assert "f32[2,2,5,128]" in str(program)  # two of four rows, two blocks, taps and bias, half of the channels


def test_error_names_what_is_unsupported():
    def unsupported_reason(**sizes):
        inputs = {name: jnp.asarray(x) for name, x in example("causal_conv1d", sizes).items()}
        with pytest.raises(NotImplementedError) as caught:
            causal_conv1d(**inputs, implementation="pallas_gpu")
        return str(caught.value)

    assert "'pallas_gpu' needs at least 128 channels on a device" in unsupported_reason(B=1, T=8, D=96, W=4)
    assert "'pallas_gpu' needs 2 to 8 taps" in unsupported_reason(B=1, T=8, D=128, W=9)
    assert "'pallas_gpu' needs an NVIDIA Hopper GPU" in unsupported_reason(B=1, T=8, D=128, W=4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, limit", [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-3)])
@pytest.mark.parametrize(
    "width, channels, length, activation",
    [(4, 384, 1000, "silu"), (4, 1024, 2048, None), (2, 129, 1000, None), (8, 384, 1000, "silu"), (4, 384, 3, "silu")],
)
def test_accuracy_on_a_gpu(width, channels, length, activation, dtype, limit):
    sizes = dict(B=2, T=length, D=channels, W=width)
    boundaries = [start for start in (2, 127, 500, 998) if start < length]
    against_reference(sizes, boundaries=boundaries, dtype=dtype, limit=limit, activation=activation)
