"""Tests a step compiled for a CPU topology: its memory, its file, `train` with that file, and the command."""

import json
import subprocess
import sys

import jax
import pytest

from mesanet_jax import compile as compile_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models, train
from mesanet_jax.aot import executable, memory, topology
from mesanet_jax.aot.build import build
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.reporting.trackers import read_json_lines
from mesanet_jax.training import step as step_lib
from tests.helpers.smoke import ROOT, assert_bitwise, ragged_batch, smoke_config


@pytest.fixture(scope="module")
def built():
    config = smoke_config("transformer", {"mesh.fsdp": 2, "mesh.tensor": 2, "train.rows_per_device": 1})
    return build(config, topology.make("cpu:8"))


def test_memory_by_kind(built):
    kinds = memory.measure(built)
    model = models.build(built.config.model)
    assert kinds["optimizer state"] == pytest.approx(2 * kinds["parameters"], rel=1e-3)
    assert model.parameter_count() * 4 / 4 < kinds["parameters"] < model.parameter_count() * 4 / 3  # a few stay whole
    assert kinds["batch"] == 4 * 4 * built.config.data.seq_len * 2  # four arrays, 8 rows over data 2 x fsdp 2
    assert all(size >= 0 for size in kinds.values())
    assert memory.limit(built) is None and memory.fits(built)


def test_saved_step_is_the_one_that_train_would_compile(built, tmp_path):
    path = tmp_path / "made" / "step"
    executable.save(path, built.executable, built.config, built.program.mesh)
    batch = mesh_lib.place_batch(ragged_batch(built.config), built.program.mesh)
    loaded = executable.load(path, built.config, built.program)
    with mesh_lib.use_mesh(built.program.mesh):
        ours, theirs = (step(built.program.init(jax.random.key(0)), batch) for step in (loaded, built.program.train))
    assert_bitwise(ours, theirs)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"optimizer.learning_rate": 0.5}, r"config.optimizer.learning_rate: 0.005 in the file, 0.5 here"),
        ({"mesh.tensor": 1}, r"mesh.tensor: 2 in the file, 1 here"),
        ({"train.log_every": 7, "name": "other"}, None),
    ],
    ids=str,
)
def test_another_program_is_refused(built, tmp_path, overrides, said):
    path = tmp_path / "step"
    executable.save(path, built.executable, built.config, built.program.mesh)
    values = {"mesh.fsdp": 2, "mesh.tensor": 2, "train.rows_per_device": 1} | overrides
    config = smoke_config("transformer", values)
    program = step_lib.compile_program(
        config, models.build(config.model), mesh_lib.make_mesh(tuple(config.mesh[axis] for axis in mesh_lib.AXES))
    )
    if said is None:
        executable.load(path, config, program)
        return
    with pytest.raises(UserError, match=said) as error:
        executable.load(path, config, program)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change", ["versions.jax", "devices.kind", "source"])
def test_other_versions_chips_and_code_are_refused(built, tmp_path, change):
    path = tmp_path / "step"
    executable.save(path, built.executable, built.config, built.program.mesh)
    head, _, payload = path.read_bytes().partition(b"\n")
    saved = json.loads(head)
    *parents, leaf = change.split(".")
    node = saved[parents[0]] if parents else saved
    node[leaf] = "another"
    path.write_bytes(json.dumps(saved).encode() + b"\n" + payload)
    with pytest.raises(UserError, match=f"{change}: another in the file"):
        executable.load(path, built.config, built.program)


def test_a_file_that_is_no_step_is_refused(built, tmp_path):
    path = tmp_path / "step"
    with pytest.raises(UserError, match="No such file"):
        executable.load(path, built.config, built.program)
    path.write_text("hello\n")
    with pytest.raises(UserError, match="was not written by mesanet_jax.compile --save"):
        executable.load(path, built.config, built.program)


def test_train_loads_the_saved_step(tiny_data, tmp_path, capsys):
    """A run with the saved step has the losses of a run that compiles; another learning rate is refused."""
    config = [
        "--config=configs/transformer.py:smoke",
        "--config.steps=3",
        "--config.model.layers=1",
        f"--config.data.path={tiny_data}",
        f"--config.model.vocab_size={PackedRows(tiny_data, 'train').vocab_size}",
        "--config.log.tensorboard=false",
        "--config.compile_cache=none",
        "--config.train.eval_batches=1",
    ]
    step = tmp_path / "step"
    assert compile_lib.main([*config, "--topology=cpu:8", f"--save={step}"]) == 0
    losses = []
    for name, more in (("loaded", [f"--config.train.executable={step}"]), ("compiled", [])):
        assert train.main([*config, *more, f"--workdir={tmp_path / name}"]) == 0
        records = read_json_lines(tmp_path / name / "metrics.jsonl")
        losses.append([record["loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 3 and losses[0] == losses[1]
    with pytest.raises(UserError, match="config.optimizer.learning_rate: 0.005 in the file, 0.1 here"):
        more = ["--config.optimizer.learning_rate=0.1", f"--config.train.executable={step}"]
        train.main([*config, *more, f"--workdir={tmp_path / 'no'}"])


def test_command_prints_saves_and_suggests(tmp_path):
    """The command runs in its own process, which has one CPU device until the topology asks for four."""
    flags = [
        "--config=configs/transformer.py:smoke",
        "--topology=cpu:4",
        "--config.data.batch_size=4",
        "--config.model.layers=1",
        "--config.data.seq_len=16",
        f"--json={tmp_path / 'facts.json'}",
        "--suggest",
        f"--save={tmp_path / 'step'}",
    ]
    command = [sys.executable, "-m", "mesanet_jax.compile", *flags]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["mesh"]["data"] == facts["chips"] == 4 and facts["fits"]
    assert facts["collectives"]["all-reduce"]["bytes"] > 0 and facts["estimate"] is None
    assert facts["suggestion"]["best"]["rows"] == 1 and facts["suggestion"]["best"]["remat"] == "none"
    assert (tmp_path / "step").stat().st_size > 10_000
    for part in ("on 4 chips of cpu:4", "temporaries", "all-reduce", "suggested: --config.model.remat=none"):
        assert part in done.stdout


def test_exit_status_of_what_does_not_fit(built, monkeypatch, capsys):
    monkeypatch.setattr(compile_lib, "build", lambda config, where: built)
    assert compile_lib.main(["--config=configs/transformer.py:smoke", "--topology=cpu:8"]) == 0
    monkeypatch.setattr(memory, "limit", lambda build: 1000)
    assert compile_lib.main(["--config=configs/transformer.py:smoke", "--topology=cpu:8"]) == 1
    assert "DOES NOT FIT" in capsys.readouterr().out
