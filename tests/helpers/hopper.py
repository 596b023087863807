"""Hopper kernels on the CPU: in the GPU interpreter, with what that lacks spelled out, or lowered for CUDA."""

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
    """`tiles.Sum` without the matrix instructions, which the interpreter has of shared memory alone."""

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
    return body(*map(_Sum, shapes))


def _value(x):
    return x if isinstance(x, jax.Array) else x[...]


@contextlib.contextmanager
def interpreted(monkeypatch):
    """Kernels in the interpreter, which raises where two accesses to memory race."""
    monkeypatch.setattr(tiles, "with_sums", _with_sums)
    monkeypatch.setattr(tiles, "unsupported_reason", lambda sizes: "")
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


def lowers(function, *arrays):
    """Whether `function` becomes a Mosaic GPU kernel when lowered for CUDA."""
    return "mosaic_gpu" in jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
