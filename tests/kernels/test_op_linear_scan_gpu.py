"""The Mosaic GPU kernels of the linear scan: in the GPU interpreter, lowered for CUDA, and on a GPU if there is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.ops.linear_scan import pallas_gpu
from mesanet_kernels.shapes import example
from tests.helpers.op_cases import assert_close, documents, evaluate, evaluator, linear_scan, random_state, rounded


def against_reference(sizes, *, dtype, limit, boundaries=()):
    """Compares outputs and gradients with the reference in float64, with an initial state and documents."""
    inputs, state = rounded(example("linear_scan", sizes)), random_state("linear_scan", sizes)
    options = dict(segment_ids=documents(sizes, *boundaries)) if boundaries else {}
    wanted = evaluate(
        lambda x, state: linear_scan(x, state=state, implementation="reference", **options),
        inputs,
        state=state,
        dtype=jnp.float64,
    )
    run = evaluator(lambda x, state: linear_scan(x, state=state, implementation="pallas_gpu", **options), dtype=dtype)
    assert_close(run(inputs, state=state), wanted, limit=limit)


@pytest.mark.skipif(not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax has no GPU interpreter")
@pytest.mark.parametrize("length", [5, 21])
def test_kernels_are_the_scan(monkeypatch, length):
    """Fewer tokens than a group, or groups and a rest; the last block of channels overlaps the one before."""
    monkeypatch.setattr(pallas_gpu, "unsupported_reason", lambda *_: "")
    monkeypatch.setattr(pallas_gpu, "GROUP", 8)
    monkeypatch.setattr(pallas_gpu, "STAGES", 2)
    with plgpu.force_gpu_interpret_mode():
        against_reference(dict(B=2, T=length, D=200), dtype=jnp.float32, limit=1e-6, boundaries=(2, length - 4))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_kernels_lower_for_cuda(dtype):
    rows, state = jax.ShapeDtypeStruct((2, 50, 960), dtype), jax.ShapeDtypeStruct((2, 960), jnp.float32)
    decays, starts = jax.ShapeDtypeStruct((2, 50, 960), jnp.float32), jax.ShapeDtypeStruct((2, 50), jnp.int32)

    def both(x, a, state, starts):
        (h, final), saved = pallas_gpu._forward(x, a, state, starts)
        return h, pallas_gpu._backward(saved, (h, final))

    lowered = jax.jit(both).trace(rows, decays, state, starts).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("mosaic_gpu") >= 2


def test_error_names_what_is_unsupported():
    with pytest.raises(NotImplementedError, match="'pallas_gpu' needs an NVIDIA Hopper GPU"):
        linear_scan(example("linear_scan", dict(B=1, T=8, D=128)), implementation="pallas_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [5, 16, 2048 + 3])
@pytest.mark.parametrize("dtype, limit", [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-3)])
def test_accuracy_on_a_gpu(length, dtype, limit):
    """The backward pass reads h as the forward pass returned it, rounded to bfloat16 if x is bfloat16."""
    boundaries = (2, length - 2) if length > 4 else ()
    against_reference(dict(B=2, T=length, D=960), dtype=dtype, limit=limit, boundaries=boundaries)


@pytest.mark.gpu
def test_the_future_changes_no_bit_on_a_gpu():
    x = {name: jnp.asarray(value) for name, value in example("linear_scan", dict(B=1, T=64, D=128)).items()}
    one, _ = linear_scan(x, implementation="pallas_gpu")
    other, _ = linear_scan(x | {"x": x["x"].at[:, 40:].multiply(1e6)}, implementation="pallas_gpu")
    np.testing.assert_array_equal(one[:, :40], other[:, :40])
