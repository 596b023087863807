"""Hopper kernels on CPUs: in the GPU interpreter, or lowered for CUDA."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mesanet_kernels.tiles import gpu as tiles

needs_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "force_gpu_interpret_mode"), reason="this jax has no GPU interpreter"
)


class _Sum:
    """Stands in for `tiles.Sum`: the interpreter supports matrix instructions only on operands in shared memory."""

    def __init__(self, shape):
        self.total = jnp.zeros(shape, jnp.float32)

    def add(self, *factors):
        for a, b in factors:
            self.total += jax.lax.dot(_value(a), _value(b), preferred_element_type=jnp.float32)

    def value(self, *, running=0):
        return self.total

    def restart(self, x):
        self.total = x


def _with_sums(body, *shapes):
    """Stands in for `tiles.with_sums`."""
    return body(*map(_Sum, shapes))


def _value(x):
    """Returns the array in a reference, or the array itself."""
    return x if isinstance(x, jax.Array) else x[...]


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Runs kernels in the interpreter, which raises an error where two accesses to memory race."""
    monkeypatch.setattr(tiles, "with_sums", _with_sums)
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def lowers(function, *arrays):
    """Returns whether `function` contains a Mosaic GPU kernel when it is lowered for CUDA."""
    return "mosaic_gpu" in jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
