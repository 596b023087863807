"""Shows the progress of a long run: a live bar on a terminal, plain lines anywhere else."""

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

from tqdm import tqdm

from mesanet_jax.formatting import duration, short_number

# The metrics that the console shows, in this order (a narrow terminal cuts the end); the trackers get all metrics.
FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.4f}",
    "consistency": lambda value: f"consistency {value:.3f}",  # only models with two passes
    "tokens_per_second": lambda value: f"{short_number(value)} tokens/s",
    "mfu": lambda value: f"MFU {100 * value:.1f} %",
    "validation_loss": lambda value: f"val loss {value:.4f}",
    "validation_bits_per_byte": lambda value: f"{value:.4f} bits/byte",
    "validation_loss_lifted": lambda value: f"lifted {value:.4f}",  # only models with a memory
    "validation_sweeps": lambda value: f"{value:.1f} sweeps",
}


class Progress:
    """Shows the steps of a run from `start` to `total`.

    Args:
      enabled: False shows nothing; only process 0 should be enabled.
      live: False prints plain lines on a terminal too.
    """

    def __init__(self, total: int, *, start: int = 0, enabled: bool = True, live: bool = True):
        self._total, self._start, self._enabled = total, start, enabled
        self._since = time.monotonic()
        self._latest: dict[str, float] = {}
        self._bar = None
        if enabled and live and sys.stdout.isatty():
            # tqdm shows nothing if the terminal reports 0 x 0, as many containers do, so the size is given.
            columns, lines = shutil.get_terminal_size()
            self._bar = tqdm(
                total=total, initial=start, file=sys.stdout, ncols=columns, nrows=lines,
                bar_format="step {n_fmt}/{total_fmt} |{bar:8}| ETA {remaining}  {desc}",
            )  # fmt: skip

    def update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Shows the completed update `step` and its scalars that are in FORMATS."""
        if not self._enabled:
            return
        if self._bar is None:
            width = len(str(self._total))
            self.message(f"step {step:>{width}}/{self._total}  {describe(scalars)}  ETA {self._remaining(step)}")
        else:
            self._latest |= scalars  # the last validation stays visible beside later steps
            self._bar.ncols = shutil.get_terminal_size().columns  # the window may have changed
            self._bar.set_description_str(describe(self._latest), refresh=False)
            self._bar.n = step
            self._bar.refresh()

    def message(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._enabled:
            tqdm.write(text, file=sys.stdout)
            sys.stdout.flush()  # so that a redirected log is up to date

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _remaining(self, step: int) -> str:
        done = step - self._start
        if done <= 0:
            return "?"
        return duration((time.monotonic() - self._since) / done * (self._total - step))


def describe(scalars: Mapping[str, float]) -> str:
    """Returns the scalars that are in FORMATS as text, such as 'loss 2.1234  12.3k tokens/s'."""
    return "  ".join(form(scalars[name]) for name, form in FORMATS.items() if name in scalars)
