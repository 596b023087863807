"""Trains on a Slurm GPU cluster: `python -m scripts.launch.slurm --nodes=2 --gpus=8 --root=DIR -- --config=... --workdir=...`

Unpacks this commit into DIR/COMMIT, which all nodes must see, makes its environment there, and submits a job with one
process a GPU. 5 minutes before its time is over the job saves and queues itself again, as it does after a crash or a
preemption, up to --restarts times. `--dry-run` prints the job's script.
"""

import pathlib
import shlex

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common


def main(argv: list[str]) -> int:
    flags = common.parser(__doc__)
    common.add_dirty_flag(flags)
    flags.add_argument("--name", default="mesanet", help="of the job")
    flags.add_argument("--nodes", type=int, required=True, help="how many nodes")
    flags.add_argument("--gpus", type=int, required=True, help="GPUs of a node")
    flags.add_argument("--time", default="24:00:00", help="limit of the job, after which it queues again")
    flags.add_argument("--partition", help="default: the cluster's")
    flags.add_argument("--root", required=True, type=pathlib.Path, help="directory that all nodes see")
    args, training = common.parse(flags, argv)
    common.check_training(training)
    if args.nodes < 1 or args.gpus < 1:
        raise UserError(f"--nodes={args.nodes} --gpus={args.gpus}: need at least 1 of each")
    commit = common.commit(dirty=args.dirty)
    directory = args.root.resolve() / commit[:12]
    text = job(args, training, directory)
    if args.dry_run:
        print(text)
    if not (directory / ".venv" / "cuda").exists():
        common.run("bash", "-c", install(directory, commit), dry_run=args.dry_run)
    common.run("sbatch", dry_run=args.dry_run, text=text)
    return 0


def install(directory: pathlib.Path, commit: str) -> str:
    """Unpacks the commit and makes its environment."""
    return " && ".join([
        "set -o pipefail",
        f"mkdir -p {shlex.quote(str(directory))}",
        f"git -C {shlex.quote(str(common.ROOT))} archive {commit} | tar -x -C {shlex.quote(str(directory))}",
        f"cd {shlex.quote(str(directory))}",
        "scripts/make_venv.sh .venv",
        ".venv/bin/python -m pip install -qq -c constraints.txt -e '.[cuda]'",
        "touch .venv/cuda",
    ])  # fmt: skip


def job(args, training: list[str], directory: pathlib.Path) -> str:
    """The script for sbatch."""
    options = {
        "job-name": args.name,
        "nodes": args.nodes,
        "ntasks-per-node": args.gpus,
        "gpus-per-node": args.gpus,
        "time": args.time,
        **({"partition": args.partition} if args.partition else {}),
        "signal": "TERM@300",  # to the training, which saves
        "output": f"{args.root.resolve()}/{args.name}-%j.log",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
    final = "|".join(map(str, common.FINAL))
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
