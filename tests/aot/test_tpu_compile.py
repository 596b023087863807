"""Tests that the whole training step compiles for TPUs, and fits their memory, on a machine without one.

This needs the TPU compiler beside the environment (inside, it would make jax look for a TPU); `make test-all` installs
it. A compilation takes minutes.
"""

import json
import os
import subprocess
import sys

import pytest

from mesanet_jax.aot.memory import GIBIBYTE
from mesanet_jax.aot.topology import COMPILER
from tests.helpers.smoke import ROOT

SMOKE_MESH = ("--config.mesh.data=2", "--config.mesh.fsdp=2")


def compiled(tmp_path, spec: str, pod: str, *flags: str) -> tuple[subprocess.CompletedProcess, dict]:
    """Runs mesanet_jax.compile for a pod; returns the finished process and its record."""
    if COMPILER not in os.environ:
        pytest.skip(f"{COMPILER} is not set; `make test-all` installs the compiler and sets it")
    record = tmp_path / "facts.json"
    command = [sys.executable, "-m", "mesanet_jax.compile", f"--config={spec}", f"--topology={pod}", f"--json={record}"]
    environment = os.environ | {"XLA_FLAGS": ""}  # the tests set flags for CPUs
    done = subprocess.run([*command, *flags], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert record.exists(), done.stderr[-4000:]
    return done, json.loads(record.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "pod", "flags"),
    [
        ("configs/transformer.py:smoke", "v5e:2x2", SMOKE_MESH),
        ("configs/mesanet.py:smoke", "v5e:2x2", SMOKE_MESH),
        ("configs/mesanet.py:smoke", "v5p:2x2x1", ("--slices=2", *SMOKE_MESH[1:])),
        ("configs/mesanet.py:smoke", "v6e:2x2", SMOKE_MESH),
        ("configs/mesanet.py:140m", "v5e:2x2", ()),
        ("configs/mesanet.py:140m", "v5p:2x2x1", ()),
    ],
    ids=str,
)
def test_training_step_compiles_and_fits(spec, pod, flags, tmp_path, capsys):
    done, facts = compiled(tmp_path, spec, pod, *flags)
    assert done.returncode == 0 and facts["fits"], done.stderr[-4000:]
    with capsys.disabled():
        print("\n" + done.stdout)
    assert sum(facts["memory"].values()) <= facts["memory_limit"]
    assert facts["unknown_loops"] == 0
    assert facts["collectives"]
    guess = facts["estimate"]
    if guess is not None:
        assert 0 < guess["mfu"][1] <= guess["mfu"][0] < 1
        if not guess["kernels_without"]:  # compiled products include recomputation and whole chunks
            assert facts["matmul_flops"] > facts["model_flops"]


@pytest.mark.slow
def test_what_does_not_fit_is_said(tmp_path):
    """48 million embeddings of 32 numbers and their two moments are 17 GiB, before any gradient or logit."""
    flags = ("--config.model.vocab_size=48000000", "--config.mesh.data=4")
    done, facts = compiled(tmp_path, "configs/transformer.py:smoke", "v5e:2x2", *flags)
    assert done.returncode == 1 and not facts["fits"]
    assert "DOES NOT FIT" in done.stdout
    assert sum(facts["memory"].values()) > facts["memory_limit"]


@pytest.mark.slow
def test_saved_step_is_written(tmp_path):
    """Loading the step needs a TPU and is not tested; test_compile.py does it for a step of a CPU."""
    path = tmp_path / "step"
    compiled(tmp_path, "configs/transformer.py:smoke", "v5e:2x2", *SMOKE_MESH, f"--save={path}")
    head, _, payload = path.read_bytes().partition(b"\n")
    assert json.loads(head)["devices"] == {"kind": "TPU v5 lite", "devices": 4, "slices": 1, "grid": [2, 2, 1]}
    assert len(payload) > GIBIBYTE / 1024
