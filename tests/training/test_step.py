"""One training step: the same on every mesh and with accumulation, never poisoned, and equal to the golden metrics.

`python -m tests.training.test_step`, run in the root of the repository, rewrites the golden metrics.
"""

import functools
import json
import pathlib
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from mesanet_jax import mesh as mesh_lib
from mesanet_jax.errors import UserError
from mesanet_jax.training import schedule
from mesanet_jax.training import step as step_lib
from tests.helpers.smoke import (
    FAMILIES,
    assert_bitwise,
    build,
    fresh,
    ragged_batch,
    relative_distances,
    smoke_config,
    update,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "one_step.json"
ONE = (1, 1, 1)
MESHES = [(8, 1, 1), (4, 2, 1), (2, 2, 2)]
STEPS = 20
families = pytest.mark.parametrize("family", FAMILIES)


def step_config(family, **train):
    """Returns a smoke config with a larger epsilon of the norms.

    The Mesa output of a document's first token is proportional to q.k, which may be tiny. With an epsilon of 1e-6, the
    norm would divide by it, and the gradients of such tokens would be rounding errors.
    """
    options = {f"train.{name}": value for name, value in train.items()}
    return smoke_config(family, {"steps": STEPS, "model.norm_eps": 1e-3} | options)


@functools.cache
def compiled(family, sizes=ONE, rows_per_device=16):
    """Returns the program of a smoke config on a mesh, with its config, mesh and model."""
    return build(step_config(family, rows_per_device=rows_per_device), sizes)


@functools.cache
def first_update(family, sizes=ONE, rows_per_device=16):
    """Returns the initial parameters, the gradients and the metrics of the first update, on the host."""
    run = compiled(family, sizes, rows_per_device)
    state = fresh(run)
    initial = jax.device_get(state["params"])
    after, metrics = update(run, state, ragged_batch(run.config))
    # The first moment is the clipped gradient times 1 - b1.
    grads = jax.device_get(optax.tree.get(after["opt_state"], "mu"))
    return SimpleNamespace(initial=initial, grads=grads, metrics=jax.device_get(metrics))


def named_leaves(tree):
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_update(one, other):
    """Equal up to the order of float32 sums."""
    for name in ("loss", "valid_tokens", "param_norm"):
        np.testing.assert_allclose(one.metrics[name], other.metrics[name], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(one.metrics["grad_norm"], other.metrics["grad_norm"], rtol=2e-6)
    distances = relative_distances(one.grads, other.grads)
    assert max(distances.values()) < 5e-6, distances


@families
# The slow meshes have no axis that the last one does not have.
@pytest.mark.parametrize(
    "sizes", [*(pytest.param(m, marks=pytest.mark.slow) for m in MESHES[:-1]), MESHES[-1]], ids=str
)
def test_every_mesh_computes_the_same(family, sizes):
    one, other = first_update(family), first_update(family, sizes)
    assert_bitwise(one.initial, other.initial)
    assert_same_update(one, other)


@families
def test_the_mesh_splits_parameters(family):
    """Otherwise the tests of equal results would prove nothing."""
    run = compiled(family, (2, 2, 2))
    kernel = run.program.state["params"]["groups"]["block_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0], kernel.shape[1] // 2, kernel.shape[2] // 2)
    for moment in ("mu", "nu"):
        moments = optax.tree.get(run.program.state["opt_state"], moment)
        shardings = lambda tree: jax.tree.map(lambda leaf: leaf.sharding, tree)
        assert shardings(moments) == shardings(run.program.state["params"])


@families
@pytest.mark.parametrize(("sizes", "rows_per_device", "parts"), [(ONE, 2, 4), ((2, 2, 2), 1, 2)], ids=str)
def test_accumulation_weights_tokens_not_parts(family, sizes, rows_per_device, parts):
    """Between 1/8 and 8/8 of a row's tokens are valid, so a mean of the parts' means would be clearly wrong."""
    assert compiled(family, sizes, rows_per_device).program.accumulation == parts
    assert_same_update(first_update(family), first_update(family, sizes, rows_per_device))


@pytest.mark.parametrize(
    ("batch", "rows_per_device", "parts"), [(8, 16, 1), (8, 8, 1), (8, 3, 4), (6, 4, 2), (6, 2, 3), (7, 3, 7)]
)
def test_parts_hold_at_most_rows_per_device(batch, rows_per_device, parts):
    config = step_config("transformer", rows_per_device=rows_per_device)
    config.data.batch_size = batch
    assert step_lib.accumulation(config, mesh_lib.make_mesh(ONE, jax.devices()[:1])) == parts


def test_batch_that_the_mesh_does_not_divide():
    config = step_config("transformer")
    config.data.batch_size = 12
    with pytest.raises(UserError, match=r"config.data.batch_size=12: not a multiple of the 8 ways"):
        step_lib.accumulation(config, mesh_lib.make_mesh((4, 2, 1)))


@pytest.mark.parametrize("sizes", [(3, 1, 1), (-1, 3, 1), (2, 2, 1)], ids=str)
def test_mesh_that_the_devices_do_not_fill(sizes):
    with pytest.raises(UserError, match="must be the number of devices, 8; try --config.mesh.data=-1"):
        mesh_lib.make_mesh(sizes)


def run_on_one_batch(family):
    """Returns the metrics of STEPS updates on the same batch."""
    run = compiled(family)
    state, records = fresh(run), []
    for _ in range(STEPS):
        state, metrics = update(run, state, ragged_batch(run.config))
        records.append({name: float(value) for name, value in metrics.items()})
    return records


@families
def test_training_gives_the_golden_metrics(family):
    """The first of two updates tests the loss and the gradient, the second one the optimizer."""
    records = run_on_one_batch(family)
    assert records[-1]["loss"] < records[0]["loss"] - 1
    for step, golden in enumerate(json.loads(GOLDEN.read_text())[family]):
        for name, value in golden.items():
            message = f"{name} of step {step + 1}; if this change is intended, run python -m tests.training.test_step"
            np.testing.assert_allclose(records[step][name], value, rtol=3e-5, err_msg=message)


def write_golden():
    names = ("loss", "grad_norm", "param_norm", "learning_rate", "valid_tokens")
    golden = {
        family: [{name: one[name] for name in names} for one in run_on_one_batch(family)[:2]] for family in FAMILIES
    }
    GOLDEN.write_text(json.dumps(golden, indent=2) + "\n")


@families
def test_state_is_consumed(family):
    run = compiled(family)
    state = fresh(run)
    update(run, state, ragged_batch(run.config))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state["params"]))


@families
def test_step_that_is_not_finite_changes_nothing(family):
    run = compiled(family)
    good = ragged_batch(run.config)
    bad = good | {"weights": np.full_like(good["weights"], np.inf)}
    state, _ = update(run, fresh(run), good)
    before = jax.device_get(state)
    for count in (1, 2):
        state, metrics = update(run, state, bad)
        assert not np.isfinite(metrics["loss"])
        assert int(state["skipped"]) == int(metrics["skipped"]) == count
    assert_bitwise(state["params"], before["params"])
    assert_bitwise(state["opt_state"], before["opt_state"])
    assert int(state["step"]) == 3  # batches and the schedule continue
    state, metrics = update(run, state, good)
    assert int(metrics["skipped"]) == 0 and np.isfinite(metrics["loss"])


def test_batches_are_placed_one_ahead_and_all_arrive():
    run, sent = compiled("mesanet"), []

    def batches():
        for seed in range(4):
            sent.append(seed)
            yield ragged_batch(run.config, seed=seed)

    with mesh_lib.use_mesh(run.mesh):
        for seed, batch in enumerate(mesh_lib.placed(batches(), run.mesh)):
            assert len(sent) == min(seed + 2, 4)
            wanted = ragged_batch(run.config, seed=seed)
            assert all(np.array_equal(batch[key], wanted[key]) for key in wanted)
    assert seed == 3 and not list(mesh_lib.placed([], run.mesh))


@families
def test_poisoned_parameters_are_noticed(family):
    run = compiled(family)
    state = fresh(run)
    embedding = state["params"]["embedding"].at[5].set(np.nan)
    batch = ragged_batch(run.config)
    batch["inputs"][:, 0] = 5
    _, metrics = update(run, state | {"params": state["params"] | {"embedding": embedding}}, batch)
    assert int(metrics["skipped"]) == 1


@families
def test_overflow_of_the_update_is_noticed(family):
    """The loss and the gradient are finite, but not the norm of the parameters: this state must not be kept."""
    run = compiled(family)
    state = fresh(run)
    moments = optax.tree.get(state["opt_state"], "mu")
    huge = moments | {"final_norm": jax.tree.map(lambda leaf: leaf + 1e25, moments["final_norm"])}
    before = jax.device_get(state["params"])
    state = state | {"opt_state": optax.tree.set(state["opt_state"], mu=huge)}
    state, metrics = update(run, state, ragged_batch(run.config))
    assert np.isfinite([metrics["loss"], metrics["grad_norm"]]).all()
    assert int(metrics["skipped"]) == 1
    assert_bitwise(jax.device_get(state["params"]), before)


NO_DECAY = {
    "mesanet": {"embedding", "final_norm.scale", "mixer_norm.scale", "mlp_norm.scale", "mixer.norm.scale",
                "mixer.lambda_raw", "mixer.input_gate.bias", "mixer.decay_gate.bias"},
    "transformer": {"embedding", "final_norm.scale", "mixer_norm.scale", "mlp_norm.scale"},
}  # fmt: skip


@families
def test_weight_decay_alone(family):
    """A batch without valid tokens has no gradient, so parameters with weight decay change by rate x decay only."""
    run = compiled(family)
    state, _ = update(run, fresh(run), ragged_batch(run.config))  # the second step's rate is above rounding
    state = state | {
        "opt_state": optax.tree.set(state["opt_state"], mu=jax.tree.map(jax.numpy.zeros_like, state["params"]))
    }
    before = jax.device_get(state["params"])
    batch = ragged_batch(run.config)
    state, metrics = update(run, state, batch | {"weights": np.zeros_like(batch["weights"])})
    assert metrics["loss"] == metrics["grad_norm"] == 0
    factor = 1 - float(metrics["learning_rate"]) * run.config.optimizer.weight_decay
    kept = set()
    for path, leaf in named_leaves(before).items():
        after = named_leaves(state["params"])[path]
        if np.array_equal(leaf, after):
            kept.add(path.replace("']['", ".").strip("[]'").replace("groups.block_0.", ""))
        else:
            np.testing.assert_allclose(after, leaf * factor, rtol=1e-6, err_msg=path)
    assert kept == NO_DECAY[family]


def test_learning_rate():
    config = step_config("mesanet")
    config.steps, config.optimizer.warmup_steps, config.optimizer.learning_rate = 100, 20, 3e-3
    rates = np.array([schedule.learning_rate(config)(step) for step in range(101)])
    np.testing.assert_allclose(rates[[0, 10, 20, 60, 100]], [1e-6, 1.5005e-3, 3e-3, 0.55 * 3e-3, 3e-4], rtol=1e-5)
    assert (np.diff(rates[:21]) > 0).all() and (np.diff(rates[20:]) < 0).all()


def test_learning_rate_without_warmup_starts_at_the_peak():
    config = step_config("mesanet")
    config.optimizer.warmup_steps = 0
    assert schedule.learning_rate(config)(0) == pytest.approx(config.optimizer.learning_rate)


if __name__ == "__main__":
    write_golden()
