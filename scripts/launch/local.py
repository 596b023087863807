"""Trains on this host, and starts again after a crash: `python -m scripts.launch.local -- --config=... --workdir=...`

One process drives all devices of a host, which is the fastest way for most; `--processes=N` gives each of N its share of
the GPUs. On a pod the launchers run this on every host: it is what starts again there.
Exit status: that of the training (mesanet_jax.train).
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main(argv: list[str]) -> int:
    flags = common.parser(__doc__)
    flags.add_argument("--processes", type=int, default=1, help="how many processes share the GPUs of this host")
    flags.add_argument("--coordinator", help="auto: this host is one of several, found by the cluster's own means")
    flags.add_argument("--pause", type=float, default=10.0, help="seconds before starting again")
    flags.add_argument("--state", type=pathlib.Path, help="file that says `running PID`, then `ended STATUS`")
    args, training = common.parse(flags, argv)
    common.check_training(training)
    commands = processes(args, training)
    if args.dry_run:
        for environment, command in commands:
            common.run("env", *(f"{name}={value}" for name, value in environment.items()), *command, dry_run=True)
        return 0
    note(args.state, f"running {os.getpid()}")
    status = supervise(lambda: processes(args, training), restarts=args.restarts, pause=args.pause)
    note(args.state, f"ended {status}")
    return status


def processes(args, training: list[str]) -> list[tuple[dict[str, str], list[str]]]:
    """Environment and command of each process; several meet at a port that is free now."""
    command = [sys.executable, "-m", "mesanet_jax.train", *training]
    if args.processes == 1:
        return [({}, command + ([f"--coordinator={args.coordinator}"] if args.coordinator else []))]
    if args.coordinator:
        raise UserError("--coordinator: goes with one process a host")
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
    """The GPUs of this host by the names that CUDA_VISIBLE_DEVICES takes."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    listed = common.ask("nvidia-smi", "--query-gpu=index", "--format=csv,noheader")
    return listed.split()


def supervise(commands, *, restarts: int, pause: float) -> int:
    """Runs the processes of `commands()` until they end for good: their status."""
    stopping: list[int] = []
    group: list[subprocess.Popen] = []

    def pass_on(number, _):
        stopping.append(number)
        for process in group:
            process.send_signal(number)

    previous = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        for attempt in range(restarts + 1):
            # Sessions of their own: a terminal's Ctrl-C would reach them twice, and the second one ends at once.
            group[:] = [
                subprocess.Popen(command, env=os.environ | environment, start_new_session=True)
                for environment, command in commands()
            ]
            statuses = [process.wait() for process in group]
            status = max((code if code >= 0 else 128 - code for code in statuses), default=0)
            final = [code for code in statuses if code in common.FINAL[1:]]
            if stopping or final or status == 0:
                return final[0] if final else status
            if attempt < restarts:
                print(f"ended with status {status}; start {attempt + 2} of {restarts + 1} in {pause:g} s", flush=True)
                time.sleep(pause)
        return status
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def note(path: pathlib.Path | None, text: str) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")


if __name__ == "__main__":
    cli.run(main)
