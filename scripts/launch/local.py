"""Trains on this host and starts again after a crash:

    python -m scripts.launch.local -- --config=configs/mesanet.py:140m --workdir=runs/mesanet --config.data.path=data

By default one process drives all devices of the host, which is the fastest way for most models. --processes=N starts N
processes that share the GPUs. On a TPU pod the launcher runs this script on every host; it restarts the training there.
The exit status is that of mesanet_jax.train.
"""

import argparse
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common

SIGNALS = (signal.SIGTERM, signal.SIGINT)
Commands = list[tuple[dict[str, str], list[str]]]  # the environment and the command of each process


def main(argv: list[str]) -> int:
    flags = common.launcher_flags(__doc__)
    flags.add_argument(
        "--processes", type=int, default=1, help="the number of processes that share the GPUs of this host"
    )
    flags.add_argument("--coordinator", help="auto: this host is one of several, which the cluster knows")
    flags.add_argument("--pause", type=float, default=10.0, help="seconds to wait before a restart")
    flags.add_argument(
        "--state", type=pathlib.Path, help="file that will say `running PID`, and at the end `ended STATUS`"
    )
    args, training = common.parse_launcher(flags, argv)
    common.check_training_arguments(training)
    commands = processes(args, training)
    if args.dry_run:
        for environment, command in commands:
            common.run_command(
                "env", *(f"{name}={value}" for name, value in environment.items()), *command, dry_run=True
            )
        return 0
    _write_state(args.state, f"running {os.getpid()}")
    status = supervise(lambda: processes(args, training), restarts=args.restarts, pause=args.pause)
    _write_state(args.state, f"ended {status}")
    return status


def processes(args: argparse.Namespace, training: list[str]) -> Commands:
    """Returns the environment and the command of each process; several processes meet at a port that is free now."""
    command = [sys.executable, "-m", "mesanet_jax.train", *training]
    if args.processes == 1:
        return [({}, command + ([f"--coordinator={args.coordinator}"] if args.coordinator else []))]
    if args.coordinator:
        raise UserError("--coordinator: works only with one process per host; leave --processes out")
    gpus = visible_gpus()
    share = len(gpus) // max(args.processes, 1)
    if not share or share * args.processes != len(gpus):
        raise UserError(f"--processes={args.processes}: does not divide the {len(gpus)} GPUs of this host")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        meeting = [f"--coordinator=127.0.0.1:{found.getsockname()[1]}", f"--processes={args.processes}"]
    return [
        (
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[index * share : (index + 1) * share])},
            [*command, *meeting, f"--process={index}"],
        )
        for index in range(args.processes)
    ]


def visible_gpus() -> list[str]:
    """Returns the GPUs of this host, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    listed = common.output_of("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    return listed.split()


def supervise(commands: Callable[[], Commands], *, restarts: int, pause: float) -> int:
    """Runs the processes of `commands()` until they end with a final status, which it returns.

    After another status it starts all of them again, at most `restarts` times and after `pause` seconds. Signals are
    passed on to the processes, and nothing is started after them.
    """
    stopping: list[int] = []
    group: list[subprocess.Popen] = []

    def pass_on(number: int, _) -> None:
        stopping.append(number)
        for process in group:
            process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in SIGNALS}
    status = 0
    try:
        for attempt in range(restarts + 1):
            # Each has its own session; otherwise Ctrl-C would reach it twice, and the second time it ends at once.
            group[:] = [
                subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
                for environment, command in commands()
            ]
            statuses = [process.wait() for process in group]
            status = max((code if code >= 0 else 128 - code for code in statuses), default=0)
            final = [code for code in statuses if code in common.FINAL_STATUSES[1:]]
            if stopping or final or status == 0:
                return final[0] if final else status
            if attempt < restarts:
                print(f"ended with status {status}; restart {attempt + 1} of {restarts} in {pause:g} s", flush=True)
                time.sleep(pause)
        return status
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _write_state(path: pathlib.Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


if __name__ == "__main__":
    cli.run(main)
