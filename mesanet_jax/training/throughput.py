"""Training speed between log lines: tokens/s, MFU, seconds a step, peak device memory."""

import time
from collections.abc import Sequence

import jax

from mesanet_jax import flops


class Throughput:
    """Measures windows between calls; `restart()` drops a window that held something else than training.

    Steps are dispatched asynchronously: call `measure` where the host has just waited for a step's metrics.
    """

    def __init__(self, tokens_per_step: int, *, flops_per_token: float, devices: Sequence[jax.Device]):
        """`tokens_per_step` over all `devices`; `flops_per_token` those of training."""
        self._tokens, self._flops, self._devices = tokens_per_step, flops_per_token, list(devices)
        self._window: tuple[int, float] | None = None  # step and time at which it began

    def measure(self, step: int) -> dict[str, float]:
        """Scalars of the window that ends with update `step`, and begins the next.

        The first call only begins one (so compilation is in none): no speeds. `mfu` (a fraction) is there where the
        chip's peak is known, `memory_gb` (1e9 bytes, the fullest device of this host) where the device counts it.
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
        """Drops the open window: what follows (an evaluation, a save) is no training step."""
        self._window = None

    def _memory(self) -> dict[str, float]:
        here = [device for device in self._devices if device.process_index == jax.process_index()]
        peaks = [
            stats["peak_bytes_in_use"]
            for device in here
            if "peak_bytes_in_use" in (stats := device.memory_stats() or {})
        ]
        return {"memory_gb": max(peaks) / 1e9} if peaks else {}
