"""Trains on a Slurm GPU cluster:

    python -m scripts.launch.slurm --nodes=2 --gpus=8 --root=DIR -- --config=configs/mesanet.py:1b --workdir=...

Unpacks this commit into DIR/COMMIT, which all nodes must see, creates its environment there, and submits a job with one
process per GPU. Five minutes before its time limit the job saves and queues itself again. It does the same after a
crash or a preemption, up to --restarts times. --dry-run prints the job's script.
"""

import argparse
import pathlib
import shlex

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common


def main(argv: list[str]) -> int:
    flags = common.launcher_flags(__doc__)
    common.add_dirty_flag(flags)
    flags.add_argument("--name", default="mesanet", help="name of the job")
    flags.add_argument("--nodes", type=int, required=True, help="the number of nodes")
    flags.add_argument("--gpus", type=int, required=True, help="GPUs per node")
    flags.add_argument("--time", default="24:00:00", help="time limit of the job, after which it queues again")
    flags.add_argument("--partition", help="partition of the cluster (default: the cluster's own)")
    flags.add_argument("--root", required=True, type=pathlib.Path, help="a directory that all nodes see")
    args, training = common.parse_launcher(flags, argv)
    common.check_training_arguments(training)
    if args.nodes < 1 or args.gpus < 1:
        raise UserError(f"--nodes={args.nodes} --gpus={args.gpus}: must be at least 1")
    commit = common.commit_to_ship(dirty=args.dirty)
    directory = args.root.resolve() / commit[:12]
    text = job(args, training, directory)
    if args.dry_run:
        print(text)
    if not (directory / ".venv" / "cuda").exists():
        common.run_command("bash", "-c", install(directory, commit), dry_run=args.dry_run)
    common.run_command("sbatch", dry_run=args.dry_run, text=text)
    return 0


def install(directory: pathlib.Path, commit: str) -> str:
    """Returns the shell command that unpacks the commit and creates its environment."""
    return " && ".join([
        "set -o pipefail",
        f"mkdir -p {shlex.quote(str(directory))}",
        f"git -C {shlex.quote(str(common.ROOT))} archive {commit} | tar -x -C {shlex.quote(str(directory))}",
        f"cd {shlex.quote(str(directory))}",
        "scripts/make_venv.sh .venv",
        ".venv/bin/python -m pip install -qq -c constraints.txt -e '.[cuda]'",
        "touch .venv/cuda",
    ])  # fmt: skip


def job(args: argparse.Namespace, training: list[str], directory: pathlib.Path) -> str:
    """Returns the script for sbatch."""
    options = {
        "job-name": args.name,
        "nodes": args.nodes,
        "ntasks-per-node": args.gpus,
        "gpus-per-node": args.gpus,
        "time": args.time,
        **({"partition": args.partition} if args.partition else {}),
        "signal": "TERM@300",  # to the training, 300 s before the limit, so that it saves
        "output": f"{args.root.resolve()}/{args.name}-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    final = "|".join(map(str, common.FINAL_STATUSES))
    return "\n".join([
        "#!/bin/bash",
        *lines,
        "#SBATCH --requeue",
        f"cd {shlex.quote(str(directory))} || exit 2",
        f"srun .venv/bin/python -u -m mesanet_jax.train --coordinator=auto {shlex.join(training)}",
        "status=$?",
        f"case $status in {final}) exit $status ;; esac",
        f'if [ "${{SLURM_RESTART_COUNT:-0}}" -lt {args.restarts} ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        "exit $status",
    ]) + "\n"  # fmt: skip


if __name__ == "__main__":
    cli.run(main)
