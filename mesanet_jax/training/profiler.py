"""Writes a profiler trace of a few training steps."""

import pathlib
from typing import Self

import jax

from mesanet_jax.schema import Config


class Profiler:
    """Traces the steps [start, start + steps) of `config.profile` to workdir/profile, for TensorBoard or Perfetto."""

    def __init__(self, config: Config, workdir: pathlib.Path):
        self._start, self._steps = config.profile.start, config.profile.steps
        self._directory, self._running = workdir / "profile", False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self._running:
            jax.profiler.stop_trace()

    def before(self, step: int) -> None:
        """Starts or stops the trace if `step` is its first step or the first after it; call this before each step."""
        if self._start is None:
            return
        if step == self._start:
            jax.profiler.start_trace(str(self._directory))
            self._running = True
        elif self._running and step == self._start + self._steps:
            jax.profiler.stop_trace()
            self._running = False
