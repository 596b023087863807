"""Measures the training speed between log lines: seconds per step, tokens per second, MFU and peak device memory."""

import time
from collections.abc import Sequence

import jax

from mesanet_jax import flops
from mesanet_jax.mesh import Device


class Throughput:
    """Measures the time between two calls of `measure`.

    Steps are dispatched asynchronously, so call `measure` only when the host has just waited for the metrics of a step.

    Args:
      tokens_per_step: tokens per training step, over all devices.
      flops_per_token: FLOPs of training per token.
      devices: all devices of the run.
    """

    def __init__(self, tokens_per_step: int, *, flops_per_token: float, devices: Sequence[Device]):
        self._tokens, self._flops, self._devices = tokens_per_step, flops_per_token, list(devices)
        self._window: tuple[int, float] | None = None  # the step and the time at which the open window began

    def measure(self, step: int) -> dict[str, float]:
        """Returns the scalars of the window that ends with update `step`, and opens the next window.

        The scalars are `step_seconds`, `tokens_per_second`, `mfu` (a fraction, if the peak FLOP/s of the chip are
        known) and `memory_gb` (10^9 bytes, the peak of the fullest device of this host, if the device counts it). The
        first call and a call after `restart` only open a window, so no window contains a compilation; they return no
        speeds.
        """
        now, scalars = time.monotonic(), {}
        if self._window is not None and step > self._window[0]:
            seconds = (now - self._window[1]) / (step - self._window[0])
            scalars = {"step_seconds": seconds, "tokens_per_second": self._tokens / seconds}
            mfu = flops.mfu(scalars["tokens_per_second"], flops_per_token=self._flops, devices=self._devices)
            if mfu is not None:
                scalars["mfu"] = mfu
        self._window = (step, now)
        return scalars | self._memory()

    def restart(self) -> None:
        """Drops the open window, because something other than training follows (an evaluation, a checkpoint)."""
        self._window = None

    def _memory(self) -> dict[str, float]:
        local = [device for device in self._devices if device.process_index == jax.process_index()]
        stats = [device.memory_stats() or {} for device in local]
        peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
        return {"memory_gb": max(peaks) / 1e9} if peaks else {}
