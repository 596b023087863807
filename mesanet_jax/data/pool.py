"""A pool of spawned processes that knows what each is doing, so that a death can be laid at a unit's door.

Spawned, never forked: a fork copies locks held by other threads. `concurrent.futures` cannot say whose task killed it.
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

Report = Callable[[int, int], None]  # (documents, bytes) done since the last report


def run(task: Callable[[Any, Report], Any], items: Sequence[Any], *, workers: int, report: Report) -> Iterator[Any]:
    """Yields `task(item, report)` for every item, as they finish; items have a `name`. `task` must be picklable.

    Raises UserError for a task's own UserError and for a worker that dies.
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
            theirs.close()  # so that a worker's death is the end of the file here
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
    """Ctrl-C reaches the whole process group, and the parent decides: a worker is born with it blocked."""
    resource_tracker.ensure_running()  # each spawn needs it, and starting it would let interrupts through again
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
    hint = "killed, or out of memory: try a smaller config.workers"
    return UserError(f"{item.name}: its worker process died ({hint}); rerun to go on")


def _worker(connection: Any, task: Callable[[Any, Report], Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
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
            return  # the parent is gone; what is finished is on disk
