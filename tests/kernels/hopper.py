"""Hopper kernels on the CPU: in the GPU interpreter, with what that lacks spelled out, or lowered for CUDA."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.gpu import tiles

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax has no GPU interpreter"
)


def _product(shape, *factors, start=None):
    """`tiles.product` without the matrix instructions, which the interpreter does not have."""
    del shape
    products = (jax.lax.dot(_value(a), _value(b), preferred_element_type=jnp.float32) for a, b in factors)
    return sum(products, 0.0 if start is None else start)


def _value(x):
    return x if isinstance(x, jax.Array) else x[...]


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Kernels in the interpreter, which raises where two accesses to memory race."""
    monkeypatch.setattr(tiles, "product", _product)
    monkeypatch.setattr(tiles, "lacks", lambda sizes: "")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def lowers(function, *arrays):
    """Whether `function` becomes a Mosaic GPU kernel when lowered for CUDA."""
    return "mosaic_gpu" in jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
