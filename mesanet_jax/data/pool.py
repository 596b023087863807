"""Runs tasks in a pool of processes, and names the task during which a process died.

The processes are spawned, not forked, because a fork copies locks that other threads hold. `concurrent.futures` is not
used because it does not tell which task a process died in.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import resource_tracker
from typing import Any

from mesanet_jax.errors import UserError

Report = Callable[[int, int], None]  # (documents, bytes) since the previous report


def run(task: Callable[[Any, Report], Any], items: Sequence[Any], *, workers: int, report: Report) -> Iterator[Any]:
    """Yields `task(item, report)` for every item, in the order in which they finish.

    Args:
      task: must be picklable; calls `report` with its progress.
      items: each has a `name`, for errors.
      report: called in this process with the progress of all tasks.

    Raises:
      UserError: a task raised UserError, or a worker process died.
    """
    context = multiprocessing.get_context("spawn")
    waiting = list(reversed(items))
    busy: dict[Any, Any] = {}
    processes = []
    try:
        for _ in range(min(workers, len(items))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, task), daemon=True)
            with _interrupts_held():
                process.start()
            theirs.close()  # the worker holds the only copy, so the connection ends when it dies
            processes.append(process)
            _hand_out(ours, waiting, busy)
        while busy:
            for connection in multiprocessing.connection.wait(list(busy)):
                kind, content = _receive(connection, busy[connection])
                if kind == "report":
                    report(*content)
                    continue
                _hand_out(connection, waiting, busy)
                yield content
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Blocks interrupts in workers started inside: Ctrl-C reaches all processes, but the parent decides what to do."""
    resource_tracker.ensure_running()  # spawning would start it, and starting it unblocks interrupts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _hand_out(connection: Any, waiting: list, busy: dict) -> None:
    busy.pop(connection, None)
    if waiting:
        busy[connection] = item = waiting.pop()
        try:
            connection.send(item)
        except ConnectionError as error:
            raise _death(item) from error


def _receive(connection: Any, item: Any) -> tuple[str, Any]:
    try:
        kind, content = connection.recv()
    except (EOFError, ConnectionError) as error:
        raise _death(item) from error
    if kind == "mistake":
        raise UserError(content)
    if kind == "crash":
        raise RuntimeError(f"{item.name}: {content}")
    return kind, content


def _death(item: Any) -> UserError:
    advice = "it was killed or ran out of memory; run the same command again, perhaps with a smaller config.workers"
    return UserError(f"{item.name}: its worker process died: {advice}")


def _worker(connection: Any, task: Callable[[Any, Report], Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process is enough
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            result = ("result", task(item, lambda *done: connection.send(("report", done))))
        except UserError as error:
            result = ("mistake", str(error))
        except Exception:
            result = ("crash", traceback.format_exc())
        try:
            connection.send(result)
        except ConnectionError:
            return  # the parent has ended; finished units are on disk
