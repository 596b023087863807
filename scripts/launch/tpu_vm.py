"""Trains on a Cloud TPU VM pod:

    python -m scripts.launch.tpu_vm run --name=NAME --zone=ZONE --type=v5p-128 -- --config=configs/mesanet.py:1b \
        --workdir=gs://BUCKET/runs/NAME --config.data.path=gs://BUCKET/data

The actions are: `create` the pod; `setup` (this commit and its pinned packages, on every host); `start` the training on
all hosts; `tail` the log of host 0; `status` of every host; `stop` the training, which saves; `delete` the pod. `run`
does the first three and then watches: after a preemption it creates the pod again, and it ends when the training ends.

The hosts need Python 3.12 or 3.13, and one --workdir that all of them see: gs://BUCKET/..., or a shared disk, which
the command of --before can mount on each host. The exit status is 0, or 2 for a mistake or a failed command; `run` ends
with the status of the training.
"""

import argparse
import shlex
import subprocess
import tempfile
import time

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common

# The states of a pod that must be created again; "" if there is no pod.
GONE = ("", "PREEMPTED", "TERMINATED", "STOPPED", "DELETING")
RUNTIMES = {  # by the type of the accelerator
    "v4": "tpu-ubuntu2204-base",
    "v5litepod": "v2-alpha-tpuv5-lite",
    "v5p": "v2-alpha-tpuv5",
    "v6e": "v2-alpha-tpuv6e",
}
STATE = "run/state"  # the file that scripts.launch.local writes, in the commit's directory on every host
PID = f"$(sed -n 's/running //p' {STATE} 2>/dev/null)"  # the process of scripts.launch.local while it runs
ALIVE = f"kill -0 {PID} 2>/dev/null"


def main(argv: list[str]) -> int:
    flags = common.launcher_flags(__doc__)
    common.add_dirty_flag(flags)
    flags.add_argument("action", choices=[*ACTIONS])
    flags.add_argument("--name", required=True, help="name of the TPU VM")
    flags.add_argument("--zone", required=True, help="zone, such as us-east5-a")
    flags.add_argument("--type", help="accelerator type to create, such as v5p-128")
    flags.add_argument("--version", help="runtime version to create (default: that of the type)")
    flags.add_argument("--before", help="a command that setup first runs on every host, for example to install Python")
    flags.add_argument("--spot", action="store_true", help="create a preemptible pod")
    flags.add_argument("--poll", type=float, default=60.0, help="run only: seconds between two checks of the pod")
    args, training = common.parse_launcher(flags, argv)
    if args.action in ("start", "run"):
        common.check_training_arguments(training)
    return ACTIONS[args.action](Pod(args, training)) or 0


class Pod:
    """A TPU VM pod, controlled by the gcloud command."""

    def __init__(self, args: argparse.Namespace, training: list[str]):
        self.args, self.training = args, training
        self.commit = common.commit_to_ship(dirty=args.dirty)
        self.directory = f"mesanet-jax/{self.commit[:12]}"

    def create(self) -> None:
        """Creates the pod."""
        version = self.args.version or RUNTIMES.get((self.args.type or "").partition("-")[0])
        if version is None:
            raise UserError(
                f"--type={self.args.type}: no runtime is known; use a type such as v5p-128, or add --version"
            )
        options = [f"--accelerator-type={self.args.type}", f"--version={version}"]
        self._gcloud("create", *options, *(["--spot"] if self.args.spot else []))

    def setup(self) -> None:
        """Unpacks the commit and creates an environment with its pinned packages, on every host."""
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/{self.commit[:12]}.tar.gz"
            common.run_command(
                "git", "-C", str(common.ROOT), "archive", "--format=tar.gz", f"--output={archive}", self.commit,
                dry_run=self.args.dry_run,
            )  # fmt: skip
            self._on_hosts(f"{self.args.before or 'true'} && mkdir -p {self.directory}")
            self._gcloud("scp", archive, f"{self.args.name}:{self.directory}/source.tar.gz", name=False, worker="all")
        install = ".venv/bin/python -m pip install -qq -c constraints.txt -e '.[tpu]' && touch .venv/tpu"
        self._in_directory(
            f"tar -xzf source.tar.gz && (test -e .venv/tpu || (scripts/make_venv.sh .venv && {install}))"
        )

    def start(self) -> None:
        """Starts the training on every host, unless it is running."""
        supervisor = [
            "scripts.launch.local",
            f"--restarts={self.args.restarts}",
            f"--state={STATE}",
            "--coordinator=auto",
        ]
        command = shlex.join([".venv/bin/python", "-m", *supervisor, "--", *self.training])
        begin = f'mkdir -p run; setsid nohup {command} >> run/log 2>&1 < /dev/null & echo "running $!" > {STATE}'
        self._in_directory(f"if {ALIVE}; then echo already running; else {begin}; fi")

    def tail(self) -> None:
        """Prints the log of host 0, and follows it."""
        self._in_directory("tail -n 100 -F run/log", worker="0")

    def status(self) -> None:
        """Prints the state and the last line of the log of every host."""
        self._in_directory(f"echo $(hostname): $(cat {STATE}; tail -n 1 run/log)")

    def stop(self) -> None:
        """Sends SIGTERM on every host; the training saves and ends."""
        self._in_directory(f"kill -TERM {PID}")

    def delete(self) -> None:
        """Deletes the pod."""
        self._gcloud("delete", "--quiet")

    def run(self) -> int:
        """Keeps the training running on a pod until it ends; returns its exit status."""
        for attempt in range(self.args.restarts + 1):
            try:
                self._begin()
                if self.args.dry_run:
                    return 0
                if (status := self._watch()) is not None:
                    return status
                lost = "the pod was preempted, or a host of it restarted"
            except UserError as error:
                if not attempt:  # the first attempt fails by a mistake, a later one for example by a lack of capacity
                    raise
                lost = str(error)
            print(f"{lost}; starting again ({attempt + 1} of {self.args.restarts})", flush=True)
            time.sleep(self.args.poll)
        raise UserError(f"{self.args.name}: lost more than {self.args.restarts} times; --restarts allows more")

    def _begin(self) -> None:
        state = self._state()
        if state in GONE:
            if state:
                self.delete()
            self.create()
        self.setup()
        self.start()

    def _watch(self) -> int | None:
        """Waits until the training ends and returns its exit status; None if the pod or a host's process is gone."""
        look = f"--command=cd {self.directory} && cat {STATE}; {ALIVE} || echo dead"
        while self._state() not in GONE:
            done = subprocess.run(self._command("ssh", look, worker="all"), capture_output=True, text=True)
            words = done.stdout.split()
            if "ended" in words:
                return int(words[words.index("ended") + 1])
            if "dead" in words:
                return None
            time.sleep(self.args.poll)
        return None

    def _state(self) -> str:
        """Returns the state of the pod, "" if there is none; a dry run assumes that there is none."""
        if self.args.dry_run:
            return ""
        listed = ["gcloud", "compute", "tpus", "tpu-vm", "list", f"--zone={self.args.zone}"]
        return common.output_of(*listed, f"--filter=name~/{self.args.name}$", "--format=value(state)").strip()

    def _in_directory(self, command: str, *, worker: str = "all") -> None:
        self._on_hosts(f"cd {self.directory} && {{ {command}; }}", worker=worker)

    def _on_hosts(self, command: str, *, worker: str = "all") -> None:
        self._gcloud("ssh", f"--command={command}", worker=worker)

    def _gcloud(self, action: str, *options: str, name: bool = True, worker: str | None = None) -> None:
        common.run_command(*self._command(action, *options, name=name, worker=worker), dry_run=self.args.dry_run)

    def _command(self, action: str, *options: str, name: bool = True, worker: str | None = None) -> list[str]:
        target = [self.args.name] if name else []
        place = [f"--zone={self.args.zone}", *([f"--worker={worker}"] if worker else [])]
        return ["gcloud", "compute", "tpus", "tpu-vm", action, *target, *options, *place]


ACTIONS = {name: getattr(Pod, name) for name in ("create", "setup", "start", "tail", "status", "stop", "delete", "run")}

if __name__ == "__main__":
    cli.run(main)
