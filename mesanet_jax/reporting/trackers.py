"""Where the numbers of a run go: `metrics.jsonl`, TensorBoard, Weights & Biases.

A sink has `log(step, scalars)` and `close()`. None of them may stop a run: one that raises is reported once and
dropped (field-notes: a full W&B quota has ended large runs). Only process 0 has sinks, and no sink uses a collective.
"""

import json
import math
import os
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
from tqdm import tqdm

from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

Scalars = Mapping[str, float]


class Sink(Protocol):
    """One place that metrics go to."""

    def log(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...


def _report(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # unlike print, leaves a live bar whole


class Trackers:
    """Sends metrics to every sink that still works."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self._sinks = list(sinks)

    def log(self, step: int, scalars: Scalars) -> None:
        """`scalars` of the completed update `step`, as Python floats."""
        self._each(lambda sink: sink.log(step, scalars))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # whatever a tracker's library raises, the run goes on
                self._sinks.remove(sink)
                _report(_dropped(type(sink).__name__, error))


def _dropped(name: str, error: Exception) -> str:
    return f"warning: {name} failed and is dropped, the run goes on: {type(error).__name__}: {' '.join(str(error).split())}"


class JsonLines:
    """One JSON object a line: step, time (seconds since 1970), then the scalars; flushed line by line.

    JSON has no NaN: such a value is null and its name is in the list `nonfinite`. Lines of steps after `from_step`,
    which a resumed run repeats, are removed first, as is a line torn by a crash.
    """

    def __init__(self, path: pathlib.Path, from_step: int = 0):
        if path.exists():
            _truncate(path, from_step)
        self._file = path.open("a")

    def log(self, step: int, scalars: Scalars) -> None:
        nonfinite = [name for name, value in scalars.items() if not math.isfinite(value)]
        values = {name: None if name in nonfinite else value for name, value in scalars.items()}
        record = {"step": step, "time": round(time.time(), 3), **values}
        if nonfinite:
            record["nonfinite"] = nonfinite
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _truncate(path: pathlib.Path, from_step: int) -> None:
    """Keeps the records up to `from_step`; atomic, so a crash here loses none of them."""
    kept = [record for record in read_json_lines(path) if record["step"] <= from_step]
    partial = path.with_suffix(".partial")
    with partial.open("w") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json_lines(path: pathlib.Path) -> list[dict]:
    """The records of a `metrics.jsonl`; a last line torn by a crash is left out.

    Raises:
      UserError: naming the line, if any other is no record.
    """
    records = []
    lines = path.read_bytes().decode(errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
            records[-1]["step"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            if number == len(lines):
                return records[: number - 1]
            raise UserError(f"{path}:{number}: not a metrics record; repair or move the file") from error
    return records


class TensorBoard:
    """Event files for TensorBoard, written without TensorFlow."""

    def __init__(self, directory: pathlib.Path, from_step: int = 0):
        from tensorboardX import SummaryWriter  # imported here: a second, and only process 0 needs it

        # purge_step hides what an earlier process logged from that step on.
        self._writer = SummaryWriter(str(directory), purge_step=from_step + 1, flush_secs=20)

    def log(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            if math.isfinite(value):  # it would print a warning for each of them
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Weights & Biases. The run's id is kept in the workdir, so that a resumed run continues the same curves.

    Steps logged twice are ignored by its server; a resumed run repeats them with the same values.

    Raises:
      UserError: if the wandb package is not installed.
    """

    def __init__(self, project: str, workdir: pathlib.Path, *, name: str, config: dict):
        try:
            import wandb
        except ImportError as error:
            message = "config.log.wandb_project is set but wandb is not installed: pip install mesanet-jax[wandb]"
            raise UserError(message) from error
        id_file = workdir / "wandb_id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        run_id = id_file.read_text().strip()
        self._run = wandb.init(
            project=project, name=name, id=run_id, resume="allow", dir=str(workdir), config=config
        )  # fmt: skip

    def log(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def make_trackers(config: Config, workdir: pathlib.Path, *, from_step: int) -> Trackers:
    """The trackers of a training run that continues after `from_step`; none on processes other than 0.

    Raises:
      UserError: for a tracker that was asked for and is not installed, or an unreadable metrics.jsonl.
    """
    if jax.process_index() != 0:
        return Trackers()
    makers = [lambda: JsonLines(workdir / "metrics.jsonl", from_step)]
    if config.log.tensorboard:
        makers.append(lambda: TensorBoard(workdir / "tensorboard", from_step))
    if config.log.wandb_project:
        makers.append(
            lambda: Wandb(config.log.wandb_project, workdir, name=config.name, config=config.to_dict())
        )  # fmt: skip
    return Trackers([sink for make in makers if (sink := _start(make)) is not None])


def _start(make: Callable[[], Sink]) -> Sink | None:
    """A sink that cannot start (no network, no quota) is dropped like one that fails later."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # see Trackers._each
        _report(_dropped("a tracker", error))
        return None
