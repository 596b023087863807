"""Measures how the wall-clock time of a run was spent, over all its restarts, and which share of it was training.

Every moment of a process belongs to one kind of KINDS. Training that is repeated after a crash becomes `lost`. The time
between two processes is not counted, because nothing ran.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Callable, Iterator

from mesanet_jax.atomic import write_atomically
from mesanet_jax.errors import UserError
from mesanet_jax.formatting import duration

FILE = "goodput.json"
KINDS: tuple[str, ...] = ("training", "start-up", "compile", "evaluation", "checkpoint", "lost")


class Goodput:
    """A stopwatch that starts with `start-up`; `resume` adds the times of earlier processes of the workdir.

    Attributes:
      seconds: the time spent on each of KINDS so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._since, self._kind = clock, clock(), "start-up"
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._at_save: dict[int, float] = {0: 0.0}  # step of a checkpoint -> seconds of training up to it

    def enter(self, kind: str) -> None:
        """Counts the time from now on as `kind`."""
        now = self._clock()
        self.seconds[self._kind] += now - self._since
        self._since, self._kind = now, kind

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Counts the time inside the block as `kind`, and the time after it as the previous kind."""
        before = self._kind
        self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def saved(self, step: int) -> None:
        """Notes that a checkpoint of `step` exists, so that a crash does not lose the training so far."""
        self.enter(self._kind)
        self._at_save[step] = self.seconds["training"]

    def resume(self, workdir: pathlib.Path, step: int) -> None:
        """Adds the times that earlier processes wrote; their training after `step` is lost.

        Raises:
          UserError: the file is not a goodput record.
        """
        path = workdir / FILE
        if not path.exists():
            return
        try:
            record = json.loads(path.read_text())
            seconds = {kind: float(record["seconds"][kind]) for kind in KINDS}
            at_save = {int(at): float(value) for at, value in record["training_seconds_at_checkpoint"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path}: not a goodput record; remove the file") from error
        self._at_save = {at: value for at, value in at_save.items() if at <= step}
        kept = self._at_save[max(self._at_save)]
        seconds |= {"training": kept, "lost": seconds["lost"] + seconds["training"] - kept}
        self.seconds = {kind: self.seconds[kind] + seconds[kind] for kind in KINDS}

    def write(self, workdir: pathlib.Path) -> None:
        """Updates the record in the workdir, atomically. Errors are ignored: a full disk is reported by checkpoints."""
        self.enter(self._kind)
        record = {"goodput": self.fraction, "seconds": self.seconds, "training_seconds_at_checkpoint": self._at_save}
        with contextlib.suppress(OSError):
            write_atomically(workdir / FILE, json.dumps(record, indent=1) + "\n")

    @property
    def fraction(self) -> float:
        """Training time over wall-clock time, from 0 to 1."""
        return self.seconds["training"] / max(sum(self.seconds.values()), 1e-9)

    def summary(self) -> str:
        """Returns 'goodput 92.1 % of 2h07m: training 1h57m, start-up 20s, ...', the longest time first."""
        self.enter(self._kind)
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{kind} {duration(value)}" for kind, value in parts if value >= 0.5)
        return f"goodput {100 * self.fraction:.1f} % of {duration(sum(self.seconds.values()))}: {spent}"
