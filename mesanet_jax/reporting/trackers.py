"""Writes the metrics of a run to `metrics.jsonl`, TensorBoard and Weights & Biases.

A sink has `log(step, scalars)` and `close()`. A sink must never stop a run: one that raises (because a quota is full,
for example) is reported once and dropped. Only process 0 has sinks, and no sink uses a collective.
"""

import json
import math
import pathlib
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
from etils import epath
from tqdm import tqdm

from mesanet_jax.atomic import write_atomically
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

Scalars = Mapping[str, float]


class Sink(Protocol):
    """One destination of metrics."""

    def log(self, step: int, scalars: Scalars) -> None: ...

    def close(self) -> None: ...


def _report(text: str) -> None:
    tqdm.write(text, file=sys.stderr)  # unlike print, does not break a live bar


class Trackers:
    """Sends metrics to every sink that has not failed."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self._sinks = list(sinks)

    def log(self, step: int, scalars: Scalars) -> None:
        """Logs the scalars of the completed update `step`, as Python floats."""
        self._each(lambda sink: sink.log(step, scalars))

    def close(self) -> None:
        self._each(lambda sink: sink.close())
        self._sinks = []

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                call(sink)
            except Exception as error:  # the libraries of trackers may raise anything
                self._sinks.remove(sink)
                _report(_dropped(type(sink).__name__, error))


def _dropped(name: str, error: Exception) -> str:
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return f"warning: {name} failed and is not used any more, the run continues: {reason}"


class JsonLines:
    """Writes one JSON object per line: step, time (seconds since 1970) and the scalars; every line is flushed.

    JSON has no NaN, so a value that is not finite becomes null and its name is listed in `nonfinite`. A resumed run
    repeats the steps after `from_step`; their lines are removed first, and so is a line that a crash cut off.
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
    """Keeps only the records up to `from_step`; atomically, so that a crash loses none of them."""
    kept = [record for record in read_json_lines(path) if record["step"] <= from_step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def read_json_lines(path: epath.Path | pathlib.Path) -> list[dict]:
    """Returns the records of a `metrics.jsonl`, without a last line that a crash cut off.

    Raises:
      UserError: any other line is not a record.
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
            raise UserError(f"{path}:{number}: this line is not a metrics record; repair or move the file") from error
    return records


class TensorBoard:
    """Writes event files for TensorBoard, without TensorFlow."""

    def __init__(self, directory: pathlib.Path, from_step: int = 0):
        from tensorboardX import SummaryWriter  # takes a second, and only process 0 needs it

        # purge_step hides what an earlier process logged after `from_step`.
        self._writer = SummaryWriter(str(directory), purge_step=from_step + 1, flush_secs=20)

    def log(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            if math.isfinite(value):  # add_scalar prints a warning for other values
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Logs to Weights & Biases. The run's id is kept in the workdir, so a resumed run continues the same curves.

    A resumed run logs some steps again, with the same values; the server ignores them.

    Raises:
      UserError: the wandb package is not installed.
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
        self._run = wandb.init(project=project, name=name, id=run_id, resume="allow", dir=str(workdir), config=config)

    def log(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


def make_trackers(config: Config, workdir: pathlib.Path, *, from_step: int) -> Trackers:
    """Returns the trackers of a training run that continues after `from_step`; processes other than 0 have none.

    Raises:
      UserError: a tracker that the config asks for is not installed, or metrics.jsonl is not readable.
    """
    if jax.process_index() != 0:
        return Trackers()
    makers: list[Callable[[], Sink]] = [lambda: JsonLines(workdir / "metrics.jsonl", from_step)]
    if config.log.tensorboard:
        makers.append(lambda: TensorBoard(workdir / "tensorboard", from_step))
    if config.log.wandb_project:
        makers.append(lambda: Wandb(config.log.wandb_project, workdir, name=config.name, config=config.to_dict()))
    return Trackers([sink for make in makers if (sink := _start(make)) is not None])


def _start(make: Callable[[], Sink]) -> Sink | None:
    """Starts a sink; one that cannot start (no network, no quota) is dropped like one that fails later."""
    try:
        return make()
    except UserError:
        raise
    except Exception as error:  # see Trackers._each
        _report(_dropped("a tracker", error))
        return None
