"""Where the wall time of a run went, over all its restarts, and how much of it trained the model.

Every moment of a process is of one kind; training that a crash made be repeated becomes `lost`. The time between two
processes is not counted: nothing ran.
"""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterator

from mesanet_jax.errors import UserError
from mesanet_jax.formatting import duration

FILE = "goodput.json"
KINDS = ("training", "start-up", "compile", "evaluation", "checkpoint", "lost")


class Goodput:
    """A stopwatch that begins with `start-up`; `resume` adds the earlier processes of the workdir."""

    def __init__(self, clock=time.monotonic):
        self._clock, self._since, self._kind = clock, clock(), "start-up"
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._at_save: dict[int, float] = {0: 0.0}  # step of a checkpoint -> seconds of training up to it

    def enter(self, kind: str) -> None:
        """From now on time is of this kind."""
        now = self._clock()
        self.seconds[self._kind] += now - self._since
        self._since, self._kind = now, kind

    @contextlib.contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Time inside is of this kind, then of the one before."""
        before = self._kind
        self.enter(kind)
        try:
            yield
        finally:
            self.enter(before)

    def saved(self, step: int) -> None:
        """A checkpoint of `step` exists: the training so far is not lost by a crash."""
        self.enter(self._kind)
        self._at_save[step] = self.seconds["training"]

    def resume(self, workdir: pathlib.Path, step: int) -> None:
        """Adds what earlier processes wrote; what they trained after `step` is lost.

        Raises:
          UserError: if the file is none of ours.
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
        """Brings the workdir's record up to date, atomically; a full disk is the checkpoint's to report, not ours."""
        self.enter(self._kind)
        path = workdir / FILE
        record = {"goodput": self.fraction, "seconds": self.seconds, "training_seconds_at_checkpoint": self._at_save}
        partial = path.with_suffix(".partial")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(record, indent=1) + "\n")
            partial.replace(path)

    @property
    def fraction(self) -> float:
        """Training over wall time, 0 to 1."""
        return self.seconds["training"] / max(sum(self.seconds.values()), 1e-9)

    def summary(self) -> str:
        """'goodput 92.1 % of 2h07m: training 1h57m, start-up 20s, ...', the longest first."""
        self.enter(self._kind)
        parts = sorted(self.seconds.items(), key=lambda item: -item[1])
        spent = ", ".join(f"{kind} {duration(value)}" for kind, value in parts if value >= 0.5)
        return f"goodput {100 * self.fraction:.1f} % of {duration(sum(self.seconds.values()))}: {spent}"
