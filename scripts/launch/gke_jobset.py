"""Trains on TPU slices of a GKE cluster: `python -m scripts.launch.gke_jobset --name=NAME --type=v5p --topology=4x4x4
--image=python:3.12 --bucket=BUCKET -- --config=... --workdir=/bucket/runs/NAME --config.data.path=/bucket/data/NAME`

Makes the JobSet, has the cluster check it, and applies it. Every host clones this commit, which must be pushed, and
installs its locked packages; BUCKET is mounted as /bucket. A slice that is preempted or crashes restarts all of them, up
to --restarts times; a training that ends with status 1 or 2 fails at once. `--dry-run` prints the manifest.
Needs kubectl, and in the cluster JobSet and the Cloud Storage FUSE driver.
"""

import json
import math
import re
import shlex

from mesanet_jax import cli
from mesanet_jax.errors import UserError
from scripts.launch import common

# --type -> the node label of GKE, chips of a host in a slice of several hosts, dimensions of a topology
TYPES = {
    "v4": ("tpu-v4-podslice", 4, 3),
    "v5e": ("tpu-v5-lite-podslice", 4, 2),
    "v5p": ("tpu-v5p-slice", 4, 3),
    "v6e": ("tpu-v6e-slice", 4, 2),
}
RETRY = 75  # any exit status that is not in common.FINAL
GRACE = 300  # seconds from SIGTERM to SIGKILL, in which the training saves


def main(argv: list[str]) -> int:
    flags = common.parser(__doc__)
    common.add_dirty_flag(flags)
    flags.add_argument("--name", required=True, help="of the JobSet")
    flags.add_argument("--type", required=True, help=f"TPU: {', '.join(TYPES)}")
    flags.add_argument("--topology", required=True, help="chips of a slice, as 4x4x4")
    flags.add_argument("--slices", type=int, default=1, help="how many slices train together")
    flags.add_argument("--image", required=True, help="container image with Python 3.12 or 3.13 and git")
    flags.add_argument("--bucket", required=True, help="Cloud Storage bucket that all hosts see as /bucket")
    flags.add_argument("--repository", help="URL to clone from; default: that of the remote `origin`")
    flags.add_argument("--spot", action="store_true", help="use preemptible nodes")
    args, training = common.parse(flags, argv)
    common.check_training(training)
    commit = common.commit(dirty=args.dirty)
    repository = args.repository or common.ask("git", "-C", str(common.ROOT), "remote", "get-url", "origin").strip()
    if not common.ask("git", "-C", str(common.ROOT), "branch", "--remotes", "--contains", commit):
        raise UserError(f"commit {commit[:12]} is on no remote, so no host can clone it; push it first")
    text = json.dumps(manifest(args, training, commit=commit, repository=repository), indent=2)
    if args.dry_run:
        print(text)
    for validation in (["--dry-run=server"], []):
        common.run("kubectl", "apply", *validation, "--filename=-", dry_run=args.dry_run, text=text)
    print(f"follow: kubectl logs --follow jobs/{args.name}-slice-0; stop: kubectl delete jobset {args.name}")
    return 0


def manifest(args, training: list[str], *, commit: str, repository: str) -> dict:
    """The JobSet: one job a slice, one pod a host, all restarted together.

    Raises:
      UserError: a name, type, topology or number that GKE would refuse or never schedule.
    """
    label, hosts, chips = hosts_of(args.type, args.topology)
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", args.name):
        raise UserError(f"--name={args.name}: needs at most 40 lower-case letters, digits and dashes, a letter first")
    if args.slices < 1 or args.restarts < 0:
        raise UserError(f"--slices={args.slices} --restarts={args.restarts}: need at least 1 and 0")
    nodes = {"cloud.google.com/gke-tpu-accelerator": label, "cloud.google.com/gke-tpu-topology": args.topology}
    container = {
        "name": "train",
        "image": args.image,
        "command": ["bash", "-c", script(training, commit=commit, repository=repository)],
        "env": [{"name": "PYTHONUNBUFFERED", "value": "1"}],
        "resources": {kind: {"google.com/tpu": chips} for kind in ("requests", "limits")},
        "volumeMounts": [{"name": "bucket", "mountPath": "/bucket"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE,
        "nodeSelector": nodes | ({"cloud.google.com/gke-spot": "true"} if args.spot else {}),
        "containers": [container],
        "volumes": [
            {"name": "bucket", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": args.bucket}}}
        ],
    }  # fmt: skip
    final = {"containerName": "train", "operator": "In", "values": [code for code in common.FINAL if code]}
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
    """(node label, hosts of a slice, chips of a host)."""
    if kind not in TYPES:
        raise UserError(f"--type={kind}: choose one of {', '.join(TYPES)}")
    label, chips, dimensions = TYPES[kind]
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", topology) or topology.count("x") != dimensions - 1:
        raise UserError(f"--topology={topology}: {kind} needs {dimensions} numbers, as {'x'.join(['4'] * dimensions)}")
    total = math.prod(map(int, topology.split("x")))
    chips = min(chips, total)
    if total % chips:
        raise UserError(f"--topology={topology}: its {total} chips are no multiple of the {chips} of a {kind} host")
    return label, total // chips, chips


def script(training: list[str], *, commit: str, repository: str) -> str:
    """What a host runs. A failed download is worth another start; `exec`, so that SIGTERM reaches the training."""
    setup = " && ".join([
        "git init -q /mesanet && cd /mesanet",
        f"git fetch -q --depth=1 {shlex.quote(repository)} {commit} && git checkout -q FETCH_HEAD",
        "python -m pip install -qq -c constraints.txt -e '.[tpu]'",
    ])  # fmt: skip
    train = f"python -m mesanet_jax.train --coordinator=auto {shlex.join(training)}"
    return f"({setup}) || exit {RETRY}; cd /mesanet && exec {train}"


if __name__ == "__main__":
    cli.run(main)
