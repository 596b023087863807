"""Trains on TPU slices of a GKE cluster:

    python -m scripts.launch.gke_jobset --name=NAME --type=v5p --topology=4x4x4 --image=python:3.12 --bucket=BUCKET -- \
        --config=configs/mesanet.py:1b --workdir=/bucket/runs/NAME --config.data.path=/bucket/data/NAME

Writes the JobSet, has the cluster check it, and applies it. Every host clones this commit, which must be pushed, and
installs its pinned packages. The Cloud Storage bucket BUCKET is mounted as /bucket. If a slice is preempted or crashes,
all slices restart, up to --restarts times; if the training ends with status 1 or 2, the JobSet fails at once. --dry-run
prints the manifest. You need kubectl, and in the cluster JobSet and the Cloud Storage FUSE driver.
"""

import argparse
import json
import math
import re
import shlex
from typing import Any

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common

# By --type: the node label of GKE, the chips per host in a slice of several hosts, the dimensions of a topology.
TYPES = {
    "v4": ("tpu-v4-podslice", 4, 3),
    "v5e": ("tpu-v5-lite-podslice", 4, 2),
    "v5p": ("tpu-v5p-slice", 4, 3),
    "v6e": ("tpu-v6e-slice", 4, 2),
}
RETRY = 75  # an exit status after which the JobSet restarts
GRACE = 300  # seconds between SIGTERM and SIGKILL, in which the training saves


def main(argv: list[str]) -> int:
    flags = common.launcher_flags(__doc__)
    common.add_dirty_flag(flags)
    flags.add_argument("--name", required=True, help="name of the JobSet")
    flags.add_argument("--type", required=True, help=f"type of TPU: {', '.join(TYPES)}")
    flags.add_argument("--topology", required=True, help="chips per slice, such as 4x4x4")
    flags.add_argument("--slices", type=int, default=1, help="the number of slices that train together")
    flags.add_argument("--image", required=True, help="container image with Python 3.12 or 3.13 and git")
    flags.add_argument("--bucket", required=True, help="Cloud Storage bucket that all hosts see as /bucket")
    flags.add_argument("--repository", help="URL to clone from (default: that of the remote `origin`)")
    flags.add_argument("--spot", action="store_true", help="use preemptible nodes")
    args, training = common.parse_launcher(flags, argv)
    common.check_training_arguments(training)
    commit = common.commit_to_ship(dirty=args.dirty)
    repository = (
        args.repository or common.output_of("git", "-C", str(common.ROOT), "remote", "get-url", "origin").strip()
    )
    if not common.output_of("git", "-C", str(common.ROOT), "branch", "--remotes", "--contains", commit):
        raise UserError(f"commit {commit[:12]} is on no remote, so the hosts cannot clone it; push it first")
    text = json.dumps(manifest(args, training, commit=commit, repository=repository), indent=2)
    if args.dry_run:
        print(text)
    for validation in (["--dry-run=server"], []):
        common.run_command("kubectl", "apply", *validation, "--filename=-", dry_run=args.dry_run, text=text)
    print(f"follow: kubectl logs --follow jobs/{args.name}-slice-0; stop: kubectl delete jobset {args.name}")
    return 0


def manifest(args: argparse.Namespace, training: list[str], *, commit: str, repository: str) -> dict[str, Any]:
    """Returns the JobSet: one job per slice and one pod per host, which are all restarted together.

    Raises:
      UserError: GKE would refuse or never schedule the name, type, topology or number of slices.
    """
    label, hosts, chips = hosts_of(args.type, args.topology)
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", args.name):
        raise UserError(
            f"--name={args.name}: use at most 40 lower-case letters, digits and dashes, with a letter first"
        )
    if args.slices < 1:
        raise UserError(f"--slices={args.slices}: must be at least 1")
    nodes = {"cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": args.topology}
    container = {
        "name": "train",
        "image": args.image,
        "command": ["bash", "-c", script(training, commit=commit, repository=repository)],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {kind: {"google.com/tpu": chips} for kind in ("requests", "limits")},
        "volumeMounts": [{"name": "bucket", "mountPath": "/bucket"}],
    }
    volume = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": args.bucket}}
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "nodeSelector": nodes | ({"cloud.google.com/gke-spot": "true"} if args.spot else {}),
        "containers": [container],
        "volumes": [{"name": "bucket", "csi": volume}],
    }
    final = {"containerName": "train", "operator": "In", "values": [code for code in common.FINAL_STATUSES if code]}
    job = {
        "parallelism": hosts,
        "completions": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}, "spec": pod},
    }
    stop = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": args.name,
            "annotations": {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"},
        },
        "spec": {
            "failurePolicy": {"maxRestarts": args.restarts, "rules": [stop]},
            "replicatedJobs": [{"name": "slice", "replicas": args.slices, "template": {"spec": job}}],
        },
    }


def hosts_of(kind: str, topology: str) -> tuple[str, int, int]:
    """Returns (node label, hosts per slice, chips per host) of a type and topology."""
    if kind not in TYPES:
        raise UserError(f"--type={kind}: choose one of {', '.join(TYPES)}")
    label, chips, dimensions = TYPES[kind]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) or topology.count("x") != dimensions - 1:
        raise UserError(
            f"--topology={topology}: {kind} needs {dimensions} numbers, such as {'x'.join(['4'] * dimensions)}"
        )
    total = math.prod(map(int, topology.split("x")))
    chips = min(chips, total)
    if total % chips:
        raise UserError(f"--topology={topology}: its {total} chips are not a multiple of the {chips} of a {kind} host")
    return label, total // chips, chips


def script(training: list[str], *, commit: str, repository: str) -> str:
    """Returns the script of a host.

    A failed setup, such as a download, ends with a status that restarts; `exec` makes SIGTERM reach the training.
    """
    setup = " && ".join([
        "git init -q /mesanet && cd /mesanet",
        f"git fetch -q --depth=1 {shlex.quote(repository)} {commit} && git checkout -q FETCH_HEAD",
        "python -m pip install -qq -c constraints.txt -e '.[tpu]'",
    ])  # fmt: skip
    train = f"python -m mesanet_jax.train --coordinator=auto {shlex.join(training)}"
    return f"({setup}) || exit {RETRY}; cd /mesanet && exec {train}"


if __name__ == "__main__":
    cli.run(main)
