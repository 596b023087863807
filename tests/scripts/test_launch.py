"""Tests the launchers with stand-ins for gcloud, kubectl and sbatch that come first on the PATH.

The stand-in for gcloud has two hosts. Each is a directory, in which it runs the commands it gets by ssh. A training
ends with status 1 on the second pod, and not before. The commit that is shipped is that of a small repository whose
`make_venv.sh` creates a Python that only writes down its arguments.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from mesanet_jax.errors import UserError
from scripts.launch import common, gke_jobset, local, slurm, tpu_vm
from tests.helpers.smoke import ROOT

TRAINING = ["--config=configs/mesanet.py:140m", "--workdir=/shared/a run"]
TPU = ["--name=pod", "--zone=z", "--type=v5p-16", "--restarts=3"]
SLURM = ["--nodes=2", "--gpus=8", "--restarts=5"]
GKE = ["--name=pod", "--type=v5p", "--topology=4x4x4", "--slices=2", "--image=i", "--bucket=b", "--restarts=7"]

GCLOUD = """
import pathlib, subprocess, sys
root = pathlib.Path(__file__).parent.parent
action, options = sys.argv[4], sys.argv[5:]
with open(root / "calls", "a") as calls:
    print(action, *options, sep="\\t", file=calls)
worker = next((o[9:] for o in options if o.startswith("--worker=")), "all")
hosts = [root / "host0", root / "host1"][: 2 if worker == "all" else 1]
if action == "list":
    states = (root / "states").read_text().splitlines()
    print(states[0])
    (root / "states").write_text("\\n".join(states[1:] or states))
for host in hosts:
    if action == "delete":
        subprocess.run(["rm", "-r", host])
    host.mkdir(exist_ok=True)
    if action == "create" and (root / "calls").read_text().count("create") > 1:
        (host / "finish").write_text("1")
    if action == "scp":
        subprocess.run(["cp", options[0], host / options[1].partition(":")[2]], check=True)
    if action == "ssh":
        command = next(o[10:] for o in options if o.startswith("--command="))
        subprocess.run(["bash", "-c", command], cwd=host, check=True)
"""
PYTHON = r"""#!/bin/bash
printf '%s\n' "$@" > run/arguments
if [ "$2" = scripts.launch.local ]; then
  if [ -e ../../reboots ]; then mv ../../reboots ../../rebooted; exit; fi
  if [ -e ../../rebooted ]; then for host in host0 host1; do echo 0 > ../../../$host/finish; done; fi
  echo "running $$" > run/state
  trap 'echo "ended 143" > run/state; exit' TERM
  for _ in $(seq 400); do [ -e ../../finish ] && break; sleep 0.05; done
  echo "ended $(cat ../../finish)" > run/state
fi
"""
MAKE_VENV = f"#!/bin/bash\nmkdir -p $1/bin run && cat > $1/bin/python <<'END'\n{PYTHON}END\nchmod +x $1/bin/python\n"


def git(folder, *arguments):
    author = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    return subprocess.run(["git", "-C", folder, *author, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A clean repository in place of this one, pushed to a remote; returns its commit."""
    folder, remote = tmp_path / "repository", tmp_path / "remote"
    (folder / "scripts").mkdir(parents=True)
    script = folder / "scripts" / "make_venv.sh"
    script.write_text(MAKE_VENV)
    script.chmod(0o755)
    git(tmp_path, "init", "-q", "--bare", remote)
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "all")
    git(folder, "remote", "add", "origin", remote)
    git(folder, "push", "-q", "origin", "HEAD")
    monkeypatch.setattr(common, "ROOT", folder)
    return git(folder, "rev-parse", "HEAD").strip()


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Returns a function (name, text) that puts a Python program of that name first on the PATH."""
    tools = tmp_path / "bin"
    tools.mkdir()
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")

    def make(name, text):
        (tools / name).write_text(f"#!{sys.executable}\n{text}")
        (tools / name).chmod(0o755)

    return make


@pytest.fixture
def pod(tmp_path, repository, stand_in, monkeypatch):
    """Installs the stand-in for gcloud and returns its folder. The pod is ready unless `states` says otherwise."""
    stand_in("gcloud", GCLOUD)
    monkeypatch.chdir(ROOT)
    (tmp_path / "states").write_text("READY")
    return tmp_path


def calls(pod):
    return [line.split("\t") for line in (pod / "calls").read_text().splitlines()]


def tpu(action, *options, training=TRAINING):
    return tpu_vm.main([action, *TPU, *options, "--", *training])


def wait_for(path: pathlib.Path, text: str):
    deadline = time.monotonic() + 20
    while not (path.exists() and text in path.read_text()):
        assert time.monotonic() < deadline, f"{path}: no {text!r}"
        time.sleep(0.02)


def test_tpu_vm_by_hand(pod, repository, capfd):
    """Sets up and starts both hosts with the given arguments; a second start does nothing; stop ends the training."""
    for action in ("create", "setup", "start"):
        tpu(action, "--before=touch mounted")
    assert calls(pod)[0] == ["create", "pod", "--accelerator-type=v5p-16", "--version=v2-alpha-tpuv5", "--zone=z"]
    for host in ("host0", "host1"):
        folder = pod / host / "mesanet-jax" / repository[:12]
        assert (pod / host / "mounted").exists()
        wait_for(folder / "run" / "state", "running")
        arguments = (folder / "run" / "arguments").read_text().splitlines()
        assert arguments[:2] == ["-m", "scripts.launch.local"] and arguments[-3:] == ["--", *TRAINING]
        assert "--coordinator=auto" in arguments and "--restarts=3" in arguments
        running = (folder / "run" / "state").read_text()
        tpu("start")
        assert (folder / "run" / "state").read_text() == running
    assert "already running" in capfd.readouterr().out
    tpu("stop")
    for host in ("host0", "host1"):
        wait_for(pod / host / "mesanet-jax" / repository[:12] / "run" / "state", "ended 143")


def test_tpu_vm_goes_on_after_a_preemption(pod):
    """There is no pod; then one runs, is preempted and created again; the end is the training's own status."""
    (pod / "states").write_text("\nREADY\nPREEMPTED\nPREEMPTED\nREADY")
    assert tpu("run", "--poll=0.3", "--spot") == 1
    made = [call[0] for call in calls(pod) if call[0] in ("create", "delete")]
    assert made == ["create", "delete", "create"]
    assert all("--spot" in call for call in calls(pod) if call[0] == "create")


def test_tpu_vm_starts_again_after_a_host_is_rebooted(pod):
    """The process on host 1 disappears silently, while that of the other host continues."""
    (pod / "host1").mkdir()
    (pod / "host1" / "reboots").touch()
    assert tpu("run", "--poll=0.3") == 0
    assert (pod / "host1" / "rebooted").exists() and not any(call[0] == "create" for call in calls(pod))


def test_tpu_vm_dry_run_needs_no_gcloud(repository, stand_in, monkeypatch, capfd):
    stand_in("gcloud", "raise SystemExit('called')")
    monkeypatch.chdir(ROOT)
    assert tpu("run", "--dry-run") == 0
    shown = [line for line in capfd.readouterr().out.splitlines() if line.startswith("+ ")]
    assert [line.split()[5] for line in shown if "gcloud" in line] == ["create", "ssh", "scp", "ssh", "ssh"]
    assert any("archive --format=tar.gz" in line and repository in line for line in shown)


def test_gke(repository, stand_in, tmp_path, monkeypatch):
    """The cluster checks the manifest before it is applied; it has as many hosts as the topology."""
    saved = f"open({str(tmp_path / 'calls')!r}, 'a').write(json.dumps([sys.argv[1:], json.load(sys.stdin)]) + '\\n')"
    stand_in("kubectl", f"import json, sys\n{saved}")
    monkeypatch.chdir(ROOT)
    assert gke_jobset.main([*GKE, "--", *TRAINING]) == 0
    (check, manifest), (apply, applied) = map(json.loads, (tmp_path / "calls").read_text().splitlines())
    assert "--dry-run=server" in check and apply == ["apply", "--filename=-"] and manifest == applied
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 7
    (slices,) = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    assert slices["replicas"] == 2 and job["parallelism"] == job["completions"] == 16
    assert job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [1, 2]
    pod = job["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5p-slice"
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    script = container["command"][-1]
    assert repository in script and "'--workdir=/shared/a run'" in script and "--coordinator=auto" in script
    assert subprocess.run(["bash", "-n", "-c", script]).returncode == 0


@pytest.mark.parametrize(
    ("option", "message"),
    [("--topology=4x4", "v5p needs 3 numbers"), ("--topology=3x3x3", "27 chips are not a multiple of the 4"),
     ("--type=v7", "choose one of v4"), ("--name=Pod", "lower-case"), ("--slices=0", "at least 1")],
)  # fmt: skip
def test_gke_refuses(repository, monkeypatch, option, message):
    monkeypatch.chdir(ROOT)
    name = option.partition("=")[0]
    options = [option if flag.startswith(f"{name}=") else flag for flag in GKE]
    with pytest.raises(UserError, match=message):
        gke_jobset.main([*options, "--dry-run", "--", *TRAINING])


def test_gke_needs_a_pushed_commit(repository, monkeypatch):
    monkeypatch.chdir(ROOT)
    git(common.ROOT, "commit", "-q", "--allow-empty", "-m", "local")
    with pytest.raises(UserError, match="is on no remote"):
        gke_jobset.main([*GKE, "--dry-run", "--", *TRAINING])


SBATCH = """
import os, pathlib, subprocess, sys
root = pathlib.Path(__file__).parent.parent
script = sys.stdin.read()
(root / "script").write_text(script)
for restart, status in enumerate((75, 143, 2)):
    (root / "srun_status").write_text(str(status))
    environment = os.environ | {"SLURM_RESTART_COUNT": str(restart), "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", script], env=environment)
    assert done.returncode == status
"""
SRUN = """
import pathlib, sys
root = pathlib.Path(__file__).parent.parent
(root / "srun").write_text("\\n".join([str(pathlib.Path.cwd()), *sys.argv[1:]]))
sys.exit(int((root / "srun_status").read_text()))
"""
SCONTROL = """
import pathlib, sys
requeued = pathlib.Path(__file__).parent.parent / "requeued"
requeued.open("a").write(" ".join(sys.argv[1:]) + "\\n")
"""


def test_slurm(repository, stand_in, tmp_path, monkeypatch):
    """Runs the job's script three times as Slurm would: it queues again after a crash or preemption, not a mistake."""
    for name, text in (("sbatch", SBATCH), ("srun", SRUN), ("scontrol", SCONTROL)):
        stand_in(name, text)
    monkeypatch.chdir(ROOT)
    assert slurm.main([*SLURM, f"--root={tmp_path / 'root'}", "--", *TRAINING]) == 0
    directory, *command = (tmp_path / "srun").read_text().splitlines()
    assert directory == str(tmp_path / "root" / repository[:12])
    assert command == [".venv/bin/python", "-u", "-m", "mesanet_jax.train", "--coordinator=auto", *TRAINING]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n" * 2
    script = (tmp_path / "script").read_text()
    assert "#SBATCH --nodes=2\n" in script and "#SBATCH --ntasks-per-node=8\n" in script and "-lt 5 ]" in script


def counting(tmp_path, *bodies: str) -> list[tuple[dict, list[str]]]:
    """Returns a command for each body; in the body, `turn` is how often the command was started before."""
    count = (
        "import pathlib, sys, time; p = pathlib.Path(sys.argv[1]); turn = len(p.read_text()) if p.exists() else 0;"
        " p.write_text('x' * (turn + 1)); "
    )
    return [({}, [sys.executable, "-c", count + body, str(tmp_path / f"turn{i}")]) for i, body in enumerate(bodies)]


@pytest.mark.parametrize(
    ("bodies", "restarts", "status", "starts"),
    [
        (["sys.exit([75, 143, 0][turn])"], 5, 0, 3),  # the watchdog, a preemption, the end
        (["sys.exit(2)"], 5, 2, 1),  # a mistake stays one
        (["sys.exit(75)"], 1, 75, 2),  # as often as --restarts allows
        (["sys.exit(76 * (turn == 0))", "import os; turn or os.kill(os.getpid(), 9)"], 1, 0, 2),  # one was killed
    ],
)
def test_starting_again(tmp_path, bodies, restarts, status, starts):
    commands = counting(tmp_path, *bodies)
    assert local.supervise(lambda: commands, restarts=restarts, pause=0) == status
    assert len((tmp_path / "turn0").read_text()) == starts


def test_a_signal_is_passed_on_and_ends_it(tmp_path):
    body = "import signal; signal.signal(15, lambda *_: sys.exit(143)); print('up', flush=True); time.sleep(60)"
    supervise = f"local.supervise(lambda: {counting(tmp_path, body)!r}, restarts=5, pause=0)"
    program = f"import sys; from scripts.launch import local; sys.exit({supervise})"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 143 and len((tmp_path / "turn0").read_text()) == 1


def test_processes_of_one_host_share_its_gpus(monkeypatch, capfd):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert local.main(["--processes=2", "--dry-run", "--", *TRAINING]) == 0
    first, second = capfd.readouterr().out.splitlines()
    assert "CUDA_VISIBLE_DEVICES=4,5 " in first and "CUDA_VISIBLE_DEVICES=6,7 " in second
    assert "--processes=2 --process=1" in second
    with pytest.raises(UserError, match="does not divide the 4 GPUs"):
        local.main(["--processes=3", "--dry-run", "--", *TRAINING])


def test_mistakes_are_found_before_anything_runs(repository, monkeypatch, stand_in):
    """Mistakes in the arguments of training and launcher, a changed tree, and a tool that is missing or fails."""
    monkeypatch.chdir(ROOT)
    for arguments, message in (
        (["start", *TPU, "--", *TRAINING, "--config.stesp=3"], "did you mean --config.steps"),
        (["start", *TPU, "--", TRAINING[0]], "--workdir: is missing"),
        (["start", *TPU, "--config.steps=3", "--", *TRAINING], "belongs after --"),
        (["start", *TPU, "--", *TRAINING, "--coordinator=auto"], "is set by the launcher"),
        (["launch", *TPU], "choose from|invalid choice"),
    ):
        with pytest.raises(UserError, match=message):
            tpu_vm.main(arguments)
    stand_in("gcloud", "import sys; print('no quota', file=sys.stderr); sys.exit(1)")
    with pytest.raises(UserError, match="status 1: no quota"):
        tpu("create")
    (common.ROOT / "scripts" / "make_venv.sh").write_text("changed")
    with pytest.raises(UserError, match=r"1 uncommitted changes \(M scripts/make_venv.sh, ...\)"):
        tpu("create", "--dry-run")
    assert tpu("create", "--dry-run", "--dirty") == 0
    with pytest.raises(UserError, match="no-such-tool: is not installed"):
        common.run_command("no-such-tool", dry_run=False)
