"""Lets several processes train one model together, and ends all of them when one of them ends.

When a process ends because of an error, a signal or the watchdog, it publishes its exit status and its last line in
the key-value store of jax.distributed: every process then prints this line and ends with this status, at once. A
process that publishes nothing (because it was killed or its host was lost) is noticed when a collective with it fails,
or when jax.distributed misses its heartbeat and aborts the other processes within `config.processes.heartbeat_seconds`.

With these exit statuses, a restart may help: STUCK (the watchdog), LOST (a collective failed) and 134 (aborted by
jax.distributed).
"""

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import NoReturn

import jax
from jax._src.distributed import global_state  # the key-value store has no public name; Orbax uses this one too

from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

STUCK, LOST = 75, 76  # EX_TEMPFAIL and EX_PROTOCOL of sysexits.h
_ENDING = "mesanet_jax/ending"  # the key under which the first process that ends publishes its status and line
_QUIET = 10.0  # seconds of waiting for the other processes before a message says so
_LINGER = 2.0  # seconds that process 0, which holds the store, waits for the others before it ends
_FOREVER = 2**31 - 1  # milliseconds, which is 24 days


def add_flags(flags: argparse.ArgumentParser) -> None:
    """Adds --coordinator, --processes and --process."""
    flags.add_argument(
        "--coordinator",
        help="train with several processes: HOST:PORT of process 0, or auto on a TPU pod, Slurm or Kubernetes",
    )
    flags.add_argument("--processes", type=int, help="with --coordinator=HOST:PORT: the number of processes")
    flags.add_argument("--process", type=int, help="with --coordinator=HOST:PORT: the number of this process, from 0")


def _check_flags(args: argparse.Namespace) -> None:
    """Raises UserError for flags that do not identify a process in a group."""
    given = (args.processes is not None, args.process is not None)
    if args.coordinator in (None, "auto"):
        if any(given):
            raise UserError("--processes and --process: can only be used together with --coordinator=HOST:PORT")
    elif not all(given):
        raise UserError(f"--coordinator={args.coordinator}: also needs --processes=N and --process=I (0 to N - 1)")
    elif not args.coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator={args.coordinator}: must be HOST:PORT or auto")
    elif not 0 <= args.process < args.processes:
        raise UserError(f"--process={args.process}: must be from 0 to {args.processes - 1}")


def is_chief() -> bool:
    """Whether this is process 0, which prints and writes for all processes; initialises no device."""
    return global_state.process_id == 0


def _store():
    """Returns the key-value store of the group that this process has joined."""
    if global_state.client is None:
        raise RuntimeError("jax.distributed is not initialized")
    return global_state.client


def publish(key: str, value: str) -> None:
    """Publishes a value from the chief to the other processes; a key can be used once."""
    if jax.distributed.is_initialized():
        _store().key_value_set(f"mesanet_jax/{key}", value)


def await_value(key: str) -> str:
    """Waits for the value that the chief publishes under `key`, and returns it."""
    return _store().blocking_key_value_get(f"mesanet_jax/{key}", _FOREVER)


@contextlib.contextmanager
def joined(args: argparse.Namespace, settings: Config) -> Iterator[None]:
    """Joins this process to the group that the flags describe; without --coordinator the process is alone.

    An exception inside the block ends all processes. Leaving the block waits for the others.

    Args:
      args: the flags of `add_flags`.
      settings: `config.processes`.

    Raises:
      UserError: incompatible flags, or no cluster was found.
    """
    _check_flags(args)
    if args.coordinator is None:
        yield
        return
    _initialize(args, settings)
    threading.Thread(target=_follow, name="distributed", daemon=True).start()
    try:
        yield
    except BaseException as error:
        end(*_last_words(error))
    jax.distributed.shutdown()


@contextlib.contextmanager
def without_cleanup() -> Iterator[None]:
    """Ends all processes when this one fails, before an outer clean-up waits for the other processes forever.

    SystemExit passes: it stands for a loss that is not finite, which every process meets at the same step.
    """
    try:
        yield
    except Exception as error:
        if jax.distributed.is_initialized():
            end(*_last_words(error))
        raise


def _initialize(args: argparse.Namespace, settings: Config) -> None:
    # XLA's own SIGTERM handler would replace the one of `Preemption`, which also handles Ctrl-C and second signals.
    jax.config.update("jax_enable_preemption_service", False)
    named = {}
    if args.coordinator != "auto":
        named = {
            "coordinator_address": args.coordinator,
            "num_processes": args.processes,
            "process_id": args.process,
            "cluster_detection_method": "deactivate",
        }
    notice = threading.Timer(_QUIET, _print_error, [
        f"--coordinator={args.coordinator}: waiting for the other processes; this process gives up"
        f" {settings.join_seconds} s after its start (config.processes.join_seconds)"
    ])  # fmt: skip
    notice.daemon = True
    notice.start()
    try:
        jax.distributed.initialize(  # aborts this process if some of the others do not come
            **named,
            heartbeat_timeout_seconds=settings.heartbeat_seconds,
            initialization_timeout=settings.join_seconds,
        )
    except (ValueError, RuntimeError) as error:
        remedy = "--coordinator=auto needs a TPU pod, Slurm or Kubernetes; elsewhere use"
        flags = "--coordinator=HOST:PORT --processes=N --process=I"
        raise UserError(f"--coordinator={args.coordinator}: {_first_line(error)} ({remedy} {flags})") from error
    finally:
        notice.cancel()


def end(status: int, text: str) -> NoReturn:
    """Ends all processes of the run with one line and an exit status.

    If several processes end at the same time, the status and line of the first one are used.
    """
    if jax.distributed.is_initialized():
        words = {"status": status, "text": f"process {global_state.process_id}: {text}"}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first, or process 0 is gone
            _store().key_value_set(_ENDING, json.dumps(words))
        time.sleep(2 * _LINGER)  # meanwhile `_follow` ends this process, unless process 0 is gone
    _leave(status, text)


def _follow() -> None:
    """Waits until any process, including this one, publishes its end, and ends this process in the same way."""
    try:
        words = json.loads(_store().blocking_key_value_get(_ENDING, _FOREVER))
    except jax.errors.JaxRuntimeError:
        return  # the run ended normally; or process 0 is gone, and jax.distributed aborts this process
    if words["status"] == STUCK:  # the stacks of all processes show which process the others wait for
        faulthandler.dump_traceback()
    if global_state.process_id == 0:
        time.sleep(_LINGER)
    _leave(words["status"], words["text"])


def _leave(status: int, text: str) -> NoReturn:
    sys.stdout.flush()
    _print_error(f"\n{text}")
    os._exit(status)


def _print_error(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _last_words(error: BaseException) -> tuple[int, str]:
    """Returns the exit status and the line for an exception; prints the traceback of an unexpected one."""
    match error:
        case UserError():
            return 2, f"error: {error}"
        case SystemExit(code=str(text)):
            return 1, text
        case KeyboardInterrupt():
            return 130, "interrupted"
    traceback.print_exception(error)
    line = _first_line(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and not line.startswith("RESOURCE_EXHAUSTED"):
        return LOST, f"error: a collective failed, another process has probably died; see its log ({line})"
    return 1, f"error: {type(error).__name__}: {line}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300]
