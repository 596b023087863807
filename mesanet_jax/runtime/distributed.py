"""Several processes of one run: how they find each other, and how none is left waiting for one that is gone.

Whatever a process has to say before it ends, an error, a signal, a watchdog, goes through the key-value store of
jax.distributed: every process then prints the same line and ends with the same status, at once. One that can say nothing
(killed, its host lost) is noticed when a collective with it fails, or by jax.distributed, which misses its heartbeat and
aborts the others within `config.processes.heartbeat_seconds`.

Exit statuses by which a launcher knows that starting again may help: STUCK (the watchdog), LOST (a collective failed)
and 134 (aborted by jax.distributed).
"""

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator

import jax
from jax._src.distributed import global_state  # the store has no public name; Orbax uses this one

from mesanet_jax.errors import UserError

STUCK, LOST = 75, 76  # EX_TEMPFAIL and EX_PROTOCOL of sysexits.h
_ENDING = "mesanet_jax/ending"  # key of the first process's last words
_QUIET = 10.0  # seconds of waiting for the others before it is said
_LINGER = 2.0  # seconds for which process 0, which holds the store, outlives them
_FOREVER = 2**31 - 1  # milliseconds: 24 days


def add_flags(flags) -> None:
    """--coordinator, --processes and --process."""
    flags.add_argument(
        "--coordinator", help="several processes: HOST:PORT of process 0; auto on a TPU pod, Slurm or Kubernetes"
    )
    flags.add_argument("--processes", type=int, help="how many processes, with --coordinator=HOST:PORT")
    flags.add_argument("--process", type=int, help="which of them this is, from 0, with --coordinator=HOST:PORT")


def _check_flags(args) -> None:
    """Raises UserError for a combination that names no process of no group."""
    given = (args.processes is not None, args.process is not None)
    if args.coordinator in (None, "auto"):
        if any(given):
            raise UserError("--processes and --process: go with --coordinator=HOST:PORT alone")
    elif not all(given):
        raise UserError(f"--coordinator={args.coordinator}: needs --processes=N and --process=I (0 to N - 1) as well")
    elif not args.coordinator.rpartition(":")[2].isdigit():
        raise UserError(f"--coordinator={args.coordinator}: needs HOST:PORT, or auto")
    elif not 0 <= args.process < args.processes:
        raise UserError(f"--process={args.process}: must be from 0 to {args.processes - 1}")


def is_chief() -> bool:
    """Whether this is the process that prints and writes for all; touches no device."""
    return global_state.process_id == 0


def from_chief(key: str, value: str | None = None) -> str:
    """The chief's `value`, on every process; `key` is used once. The others give none, and wait for it."""
    if not jax.distributed.is_initialized():
        return value
    if value is not None:
        global_state.client.key_value_set(f"mesanet_jax/{key}", value)
    return global_state.client.blocking_key_value_get(f"mesanet_jax/{key}", _FOREVER)


@contextlib.contextmanager
def joined(args, settings) -> Iterator[None]:
    """This process as one of those that the flags name; without --coordinator it stays alone.

    An exception inside ends all processes. Leaving waits for the others. `settings` are `config.processes`.

    Raises:
      UserError: flags that go not together, or no cluster found.
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
    """An error of this process alone ends all at once, before a clean-up further out waits for the others in vain.

    SystemExit passes: what it stands for, a loss that is not finite, every process meets at the same step.
    """
    try:
        yield
    except Exception as error:
        if jax.distributed.is_initialized():
            end(*_last_words(error))
        raise


def _initialize(args, settings) -> None:
    # XLA's own handler of SIGTERM would replace that of `Preemption`, which also knows Ctrl-C and a second signal.
    jax.config.update("jax_enable_preemption_service", False)
    own = {"coordinator_address": args.coordinator, "num_processes": args.processes, "process_id": args.process}
    named = {} if args.coordinator == "auto" else own | {"cluster_detection_method": "deactivate"}
    patience = f"gives up {settings.join_seconds} s after its start"
    waits = (
        f"--coordinator={args.coordinator}: waiting for the other processes; {patience} (config.processes.join_seconds)"
    )
    notice = threading.Timer(_QUIET, print, [waits], {"file": sys.stderr, "flush": True})
    notice.daemon = True
    notice.start()
    try:
        jax.distributed.initialize(  # which aborts the process where not all come
            **named,
            heartbeat_timeout_seconds=settings.heartbeat_seconds,
            initialization_timeout=settings.join_seconds,
        )
    except (ValueError, RuntimeError) as error:
        remedy = "where no TPU pod, Slurm or Kubernetes can be asked, --coordinator=HOST:PORT --processes=N --process=I"
        raise UserError(f"--coordinator={args.coordinator}: {_first_line(error)} ({remedy})") from error
    finally:
        notice.cancel()


def end(status: int, text: str) -> None:
    """Ends this process, and with it all others of the run, with one line and a status.

    Of several processes that end at the same time, the first speaks for all.
    """
    if jax.distributed.is_initialized():
        words = {"status": status, "text": f"process {global_state.process_id}: {text}"}
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first, or process 0 is gone
            global_state.client.key_value_set(_ENDING, json.dumps(words))
        time.sleep(2 * _LINGER)  # `_follow` ends the process meanwhile, unless process 0 is gone
    _leave(status, text)


def _follow() -> None:
    """Waits for the last words of any process, this one included, and ends this process with them."""
    try:
        words = json.loads(global_state.client.blocking_key_value_get(_ENDING, _FOREVER))
    except jax.errors.JaxRuntimeError:
        return  # the end of a run that went well; or process 0 is gone, and jax.distributed aborts this one
    if words["status"] == STUCK:  # where this process waits tells which one it waits for
        faulthandler.dump_traceback()
    if global_state.process_id == 0:
        time.sleep(_LINGER)
    _leave(words["status"], words["text"])


def _leave(status: int, text: str) -> None:
    sys.stdout.flush()
    print(f"\n{text}", file=sys.stderr, flush=True)
    os._exit(status)


def _last_words(error: BaseException) -> tuple[int, str]:
    """The exit status and the line for an exception; one that nobody expected is printed whole."""
    match error:
        case UserError():
            return 2, f"error: {error}"
        case SystemExit(code=str(text)):
            return 1, text
        case KeyboardInterrupt():
            return 130, "interrupted"
    traceback.print_exception(error)
    if isinstance(error, jax.errors.JaxRuntimeError) and not str(error).startswith("RESOURCE_EXHAUSTED"):
        return (
            LOST,
            f"error: a collective failed, another process has probably died; see its log ({_first_line(error)})",
        )
    return 1, f"error: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:300]
