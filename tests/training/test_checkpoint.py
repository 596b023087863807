"""Checkpoints restore every bit on any mesh, are compared before and after loading, and are kept by two rules.

The states here are those of small models, with their optimizer states.
"""

import functools
import json
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.errors import UserError
from mesanet_jax.runtime import distributed, workdir
from mesanet_jax.training import checkpoint as checkpoint_lib
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.resume import initial_state
from tests.helpers.smoke import ROOT, assert_bitwise, smoke_config
from tests.runtime.test_processes import ProcessRuns

METADATA = {"config": {"name": "a run"}, "data": "fingerprint"}
ONE, ROWS, COLUMNS, ALL = (1, 1, 1), (2, 4, 1), (4, 1, 2), (8, 1, 1)


@functools.cache
def run_on(sizes=ONE, family="transformer", **overrides):
    """Returns the program of a small model on a mesh of the first devices."""
    config = smoke_config(family, {f"model.{name}": value for name, value in overrides.items()})
    mesh = mesh_lib.make_mesh(sizes, jax.devices()[: np.prod(sizes)])
    model = models.build(config.model)
    return SimpleNamespace(mesh=mesh, model=model, program=step_lib.compile_program(config, model, mesh))


def state_on(run):
    """Returns a state with different values in every leaf, with the shardings of the program."""
    keys = iter(range(1, 10**6))

    def leaf(shape):
        values = np.random.default_rng(next(keys)).standard_normal(shape.shape) * 100
        return jax.device_put(values.astype(shape.dtype), shape.sharding)

    return jax.tree.map(leaf, run.program.state)


def saved_run(path, run, steps=(3,), **rules):
    """Saves the same state at each of the steps, and returns it."""
    state = state_on(run)
    saved_state(path, state, steps, **rules)
    return state


def saved_state(path, state, steps, **rules):
    checkpoints = checkpoint_lib.Checkpoints(path, **rules)
    for step in steps:
        checkpoints.save(step, state, METADATA)
        checkpoints.wait()
    checkpoints.close()


def restore(path, run, step=3):
    checkpoints = checkpoint_lib.Checkpoints(path)
    state = checkpoints.restore(step, run.program.state)
    checkpoints.close()
    return state


@pytest.mark.parametrize(
    ("before", "after"),
    [(ONE, ONE), (ALL, ONE), (ONE, ALL), (ROWS, COLUMNS), (COLUMNS, ROWS), (ALL, (2, 2, 2))],
    ids=str,
)
def test_restores_to_the_bit_on_any_mesh(tmp_path, before, after):
    state = saved_run(tmp_path, run_on(before))
    restored = restore(tmp_path, run_on(after))
    assert_bitwise(jax.device_get(restored), jax.device_get(state))
    shardings = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
    assert shardings(restored) == shardings(run_on(after).program.state)


def test_trained_state_comes_back_with_its_structure(tmp_path):
    """The compiled step accepts the restored state."""
    run = run_on()
    saved_run(tmp_path, run)
    assert jax.tree.structure(restore(tmp_path, run)) == jax.tree.structure(run.program.state)


def test_metadata(tmp_path):
    saved_run(tmp_path, run_on())
    checkpoints = checkpoint_lib.Checkpoints(tmp_path)
    metadata = checkpoints.metadata(3)
    assert {name: metadata[name] for name in METADATA} == json.loads(json.dumps(METADATA))
    checkpoints.close()


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"dim": 48}, "embedding is float32[512, 32] in the checkpoint, float32[512, 48] in the model"),
        ({"layers": 4}, "mixer/key/kernel is float32[2, 32, 32] in the checkpoint, float32[4, 32, 32] in the model"),
        ({"vocab_size": 600}, "embedding is float32[512, 32] in the checkpoint, float32[640, 32] in the model"),
        ({"tie_embeddings": False}, "head float32[512, 32] is only in the model"),
        ({"family": "mesanet"}, "mixer/conv_k float32[2, 4, 32] is only in the model"),
    ],
    ids=lambda case: next(iter(case)) if isinstance(case, dict) else "",
)
def test_what_does_not_fit_is_listed(tmp_path, changed, expected):
    saved_run(tmp_path, run_on())
    other = run_on(ONE, **changed)
    for load in (restore, lambda path, run: checkpoint_lib.restore_params(path, run.model, run.mesh)):
        with pytest.raises(UserError, match="checkpoint 3 does not fit this model") as raised:
            load(tmp_path, other)
        assert expected in str(raised.value) and "\n" not in str(raised.value)


def test_leaves_only_in_the_checkpoint_are_listed(tmp_path):
    saved_run(tmp_path, run_on(ONE, tie_embeddings=False))
    with pytest.raises(UserError, match=r"head float32\[512, 32\] is only in the checkpoint"):
        restore(tmp_path, run_on())


def test_other_dtype_is_listed():
    one = {"a": [jax.ShapeDtypeStruct((2,), jnp.float32)], "b": jax.ShapeDtypeStruct((), jnp.int32)}
    other = {"a": [jax.ShapeDtypeStruct((2,), jnp.bfloat16)], "b": jax.ShapeDtypeStruct((), jnp.int32)}
    assert checkpoint_lib.differences(one, other) == ["a/0 is float32[2] in the checkpoint, bfloat16[2] in the model"]
    assert checkpoint_lib.differences(one, one) == []


def test_long_lists_of_differences_are_cut(tmp_path):
    saved_run(tmp_path, run_on())
    with pytest.raises(UserError, match=r"; and \d+ more$") as raised:
        restore(tmp_path, run_on(ONE, family="mesanet", dim=48))
    assert str(raised.value).count(";") == checkpoint_lib.SHOWN


@pytest.mark.parametrize(
    ("rules", "kept"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 1, "keep_every": 3}, [3, 6]),
        ({"keep_last": 2, "keep_every": 4}, [4, 5, 6]),
    ],
)
def test_rules_of_keeping(tmp_path, rules, kept):
    run = SimpleNamespace(program=SimpleNamespace(state={"params": {"w": jnp.ones(3)}, "step": jnp.zeros((), int)}))
    saved_run(tmp_path, run, steps=range(1, 7), **rules)
    checkpoints = checkpoint_lib.Checkpoints(tmp_path)
    assert checkpoints.steps() == kept
    checkpoints.close()


def test_parameters_alone(tmp_path):
    """The parameters of the newest or of a given step are restored on another mesh, without the optimizer state."""
    run, other = run_on(ALL), run_on((2, 2, 2))
    state = saved_run(tmp_path, run, steps=(3, 5))
    for wanted, step in ((None, 5), (3, 3)):
        params, found = checkpoint_lib.restore_params(tmp_path, other.model, other.mesh, step=wanted)
        assert found == step
        assert_bitwise(jax.device_get(params), jax.device_get(state["params"]))


def test_no_checkpoint_to_read(tmp_path):
    run = run_on()
    read = functools.partial(checkpoint_lib.restore_params, tmp_path, run.model, run.mesh)
    with pytest.raises(UserError, match="no checkpoints here; train first"):
        read()
    (tmp_path / checkpoint_lib.DIRECTORY).mkdir()
    with pytest.raises(UserError, match="no finished checkpoint; there are none"):
        read()
    saved_run(tmp_path, run, steps=(3, 5))
    with pytest.raises(UserError, match=r"no checkpoint of step 4; there are \[3, 5\]"):
        read(step=4)


def test_restores_on_a_machine_with_fewer_devices(tmp_path):
    """A process with one device restores what was saved by eight."""
    state = saved_run(tmp_path, run_on((2, 2, 2)))
    script = (
        "import pathlib, sys, jax, tests.training.test_checkpoint as t; assert len(jax.devices()) == 1;"
        "state = t.restore(pathlib.Path(sys.argv[1]), t.run_on());"
        "print(sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(jax.device_get(state))))"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == sum(float(abs(leaf).sum()) for leaf in jax.tree.leaves(jax.device_get(state)))


def test_failed_save_is_not_swallowed(tmp_path, monkeypatch):
    """An error of the background write is raised by `wait` or by the next save."""
    checkpoints = checkpoint_lib.Checkpoints(tmp_path)
    for name in ("os.rename", "os.replace", "pathlib.Path.rename"):
        monkeypatch.setattr(name, _no_space)
    with pytest.raises(
        UserError, match="checkpoint 1 could not be written: .*No space left.*newest good checkpoint: none"
    ):
        checkpoints.save(1, state_on(run_on()), METADATA)
        checkpoints.wait()


def _no_space(*_, **__):
    raise OSError(28, "No space left on device")


def test_full_disk_keeps_what_is_there(tmp_path, monkeypatch):
    state = saved_run(tmp_path, run_on())
    checkpoints = checkpoint_lib.Checkpoints(tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match="checkpoint 4 could not be written: needs .* newest good checkpoint: 3"):
        checkpoints.save(4, state, METADATA)
    checkpoints.close()
    assert_bitwise(jax.device_get(restore(tmp_path, run_on())), jax.device_get(state))


def test_read_only_workdir_is_one_line(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr("os.makedirs", refuse)
    path = workdir.path(str(tmp_path / "run"))
    with pytest.raises(UserError, match=f"^--workdir={path}: Read-only file system$"), workdir.lock(path):
        pass


def largest(folder):
    return max((path for path in folder.rglob("d/*")), key=lambda path: path.stat().st_size)


def cut(path):
    path.write_bytes(path.read_bytes()[:50])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "an array is cut": lambda step: cut(largest(step / "params")),
    "an array is gone": lambda step: largest(step / "params").unlink(),
    "a bit is flipped": lambda step: flip(largest(step / "training")),
    "its index is gone": lambda step: (step / "params" / "manifest.ocdbt").unlink(),
    "its description is gone": lambda step: (step / "training" / "_METADATA").unlink(),
    "its description is cut": lambda step: cut(step / "params" / "_METADATA"),
    "the parameters are gone": lambda step: shutil.rmtree(step / "params"),
    "the metadata are cut": lambda step: cut(step / "run" / "metadata"),
    "all is gone": lambda step: (shutil.rmtree(step), step.mkdir()),
}


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    """Makes checkpoints of the steps 3 and 5, with arrays that are long enough to be damaged in the middle."""
    random = np.random.default_rng(0).standard_normal(10_000).astype(np.float32)
    state = {"params": {"w": jnp.asarray(random)}, "opt_state": {"m": jnp.asarray(random[::-1])}, "step": jnp.int32(5)}
    path = tmp_path_factory.mktemp("two")
    saved_state(path, state, steps=(3, 5))
    return path, state


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoint_is_set_aside_for_the_one_before(two_steps, tmp_path, capsys, damage):
    source, state = two_steps
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / checkpoint_lib.DIRECTORY / "5")
    targets = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    program, saved = SimpleNamespace(state=targets), checkpoint_lib.Checkpoints(tmp_path)
    restored, step = initial_state(None, program, None, saved, METADATA)
    assert step == 3
    assert_bitwise(restored, state)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "warning" in said and "checkpoint 5 is damaged" in said
    (aside,) = tmp_path.glob("damaged-5-*")
    assert str(aside) in said and "previous checkpoint is of step 3" in said
    assert saved.steps() == [3]
    saved.save(5, state, METADATA)  # the damaged checkpoint is not in the way
    saved.wait()
    assert saved.steps() == [3, 5]
    saved.close()


def test_the_only_checkpoint_stays_where_it_is(two_steps, tmp_path):
    """A run does not start from step 0 by itself."""
    source, state = two_steps
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / checkpoint_lib.DIRECTORY / "3")
    cut(largest(tmp_path / checkpoint_lib.DIRECTORY / "5"))
    saved = checkpoint_lib.Checkpoints(tmp_path)
    with pytest.raises(
        UserError, match="checkpoint 5 is damaged: .*; there is no other checkpoint: remove it"
    ) as raised:
        initial_state(None, SimpleNamespace(state=state), None, saved, METADATA)
    assert "\n" not in str(raised.value) and saved.steps() == [5]
    saved.close()


@pytest.mark.slow
def test_damaged_checkpoint_of_two_processes(tmp_path, tiny_data):
    """All processes end with the status after which a launcher restarts them, then resume from the previous step."""
    runs = ProcessRuns(tmp_path, tiny_data)
    group = runs.begin("run", (2, 2), {"checkpoint.every": 4})
    runs.await_step("run", 9, group)
    group.signal(0, signal.SIGTERM)
    assert [end.status for end in group.ended()] == [128 + signal.SIGTERM] * 2
    before, newest = runs.steps("run")[-2:]
    cut(largest(tmp_path / "run" / checkpoint_lib.DIRECTORY / str(newest) / "params"))
    ends = runs.begin("run", (2, 2)).ended()
    assert [end.status for end in ends] == [distributed.LOST] * 2, ends
    assert all(
        f"the previous checkpoint is of step {before}; run the same command again" in end.output for end in ends
    ), ends
    assert f"resuming after step {before}" in runs.finish("run", (2, 2))[0].output
