"""Updates of Muon and its groups: compared with a float64 version, on every family, and in a run that is resumed.

L layers, I inputs and O outputs of a matrix.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.errors import UserError
from mesanet_jax.recipes import nanochat_recipe
from mesanet_jax.training import checkpoint, optimizer, schedule
from tests.helpers.smoke import assert_bitwise, build, fresh, ragged_batch, smoke_config, update
from tests.test_golden_configs import CONFIGS

SMOKE = [name for name in CONFIGS if "-smoke" in name]


def muon_config(family="transformer", *, nanochat=True, **overrides):
    """Returns a smoke config with Muon, plain or with nanochat's values."""
    config = smoke_config(family)
    config.steps, config.optimizer.name = 20, "muon"
    if nanochat:
        nanochat_recipe.optimizer(config)
        config.optimizer.muon.momentum_warmup_steps = 4
    config.update_from_flattened_dict(overrides)
    config_lib.validate(config)
    return config


# ---- compared with an independent float64 version


MATRICES = {"wide": (3, 8, 24), "tall": (3, 24, 8), "square": (1, 12, 12)}
OTHERS = {
    "embedding": (32, 8),
    "head": (32, 8),
    "residual_scale": (3,),
    "embedding_scale": (3,),
    "smear": (1,),
    "norm": (3, 8),
}


def little_model():
    """Returns what `optimizer.make` reads of a model, with parameters of every group."""
    shapes = {"groups": {name: {"kernel": shape} for name, shape in MATRICES.items()}} | OTHERS
    is_shape = lambda leaf: isinstance(leaf, tuple)
    axes = jax.tree.map(
        lambda shape: ("embed", "mlp") if len(shape) == 3 else (None,) * len(shape), shapes, is_leaf=is_shape
    )
    shapes = jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32), shapes, is_leaf=is_shape)
    return SimpleNamespace(shapes=shapes, axes=axes)


def random_tree(shapes, *, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)


POLAR_EXPRESS = [
    (8.15655, -22.48329, 15.87877), (4.04293, -2.80892, 0.50002), (3.89167, -2.77248, 0.50607),
    (3.28575, -2.36813, 0.46449), (2.34654, -1.70978, 0.42324),
]  # fmt: skip


class NanochatMuon:
    """The six steps of nanochat's recipe for one matrix [rows, columns], whose rows are its outputs."""

    def __init__(self, weight):
        self.weight, self.buffer, self.second = weight, np.zeros_like(weight), 0.0

    def update(self, gradient, *, rate, momentum, decay, beta2=0.9):
        rows, columns = gradient.shape
        self.buffer = momentum * self.buffer + (1 - momentum) * gradient
        g = (1 - momentum) * gradient + momentum * self.buffer
        row_norms = np.sqrt((g**2).sum(1, keepdims=True))
        x = g * row_norms.mean() / row_norms
        x = x / (1.01 * np.sqrt((x**2).sum()) + 1e-6)
        for a, b, c in POLAR_EXPRESS:
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x *= np.sqrt(min(rows, columns) / (x**2).sum())
        mean_square = (x**2).mean(1 if rows >= columns else 0, keepdims=True)
        self.second = beta2 * self.second + (1 - beta2) * mean_square
        y = x / np.sqrt(self.second)
        y *= np.sqrt((x**2).sum() / (y**2).sum())
        rate = rate * np.sqrt(max(1, rows / columns))
        self.weight = self.weight - rate * (y + decay * self.weight * (y * self.weight >= 0))


class Adam:
    """AdamW for one parameter, with bias correction."""

    def __init__(self, weight, peak, b1, b2, decay):
        self.weight, self.peak, self.b1, self.b2, self.decay = weight, peak, b1, b2, decay
        self.mu, self.nu, self.count = 0.0, 0.0, 0

    def update(self, gradient, share):
        self.count += 1
        self.mu = self.b1 * self.mu + (1 - self.b1) * gradient
        self.nu = self.b2 * self.nu + (1 - self.b2) * gradient**2
        mu, nu = self.mu / (1 - self.b1**self.count), self.nu / (1 - self.b2**self.count)
        self.weight = self.weight - share * self.peak * (mu / (np.sqrt(nu) + 1e-10) + self.decay * self.weight)


def test_three_updates_are_those_of_the_recipe():
    """The steps are not successive: schedules use the trainer's step, but Adam's bias correction counts updates."""
    model, config = little_model(), muon_config()
    config.optimizer.warmup_from, config.optimizer.warmup_steps = 0.0, 5
    config.optimizer.no_decay = ("norm",)
    config.optimizer.muon.weight_decay = 3.0  # large enough to be seen
    transformation = optimizer.make(config, model)
    params = random_tree(model.shapes, seed=0)
    state = jax.jit(transformation.init)(params)
    update = jax.jit(transformation.update)

    wanted = {name: [NanochatMuon(x.T.astype(float)) for x in params["groups"][name]["kernel"]] for name in MATRICES}
    groups = config.optimizer.groups
    group = lambda name: groups[name] if name in groups else (0.02, 0.9, 0.98, 0.0)
    others = {name: Adam(params[name].astype(float), *group(name)) for name in OTHERS}
    for step, share, momentum in ((2, 2 / 5, 0.91), (6, 1, 0.97), (15, 0.05 + 0.95 * 5 / 13, 0.97 - 0.07 * 8 / 13)):
        grads = random_tree(model.shapes, seed=step)
        updates, state = update(grads, state, params, step=jnp.int32(step))
        params = optax.apply_updates(params, updates)
        decay = 3.0 * 0.5 * (1 + np.cos(np.pi * step / 20))
        for name, matrices in wanted.items():
            for matrix, gradient in zip(matrices, grads["groups"][name]["kernel"], strict=True):
                matrix.update(gradient.T.astype(float), rate=0.02 * share, momentum=momentum, decay=decay)
        for name, adam in others.items():
            adam.update(grads[name].astype(float), share)
    for name, matrices in wanted.items():
        whole = np.stack([matrix.weight.T for matrix in matrices])
        np.testing.assert_allclose(params["groups"][name]["kernel"], whole, atol=5e-6, err_msg=name)
    for name, adam in others.items():
        np.testing.assert_allclose(params[name], adam.weight, atol=5e-6, err_msg=name)


def test_plain_muon_is_that_of_jordan():
    """Nesterov momentum 0.95, five sweeps of the quintic, times sqrt(max(1, rows / columns)), and nothing else."""
    model, config = little_model(), muon_config(nanochat=False)
    transformation = optimizer.make(config, model)
    params, grads = random_tree(model.shapes, seed=0), random_tree(model.shapes, seed=1)
    updates, _ = jax.jit(transformation.update)(grads, transformation.init(params), params, step=jnp.int32(2))
    for name in MATRICES:
        for moved, gradient in zip(updates["groups"][name]["kernel"], grads["groups"][name]["kernel"], strict=True):
            x = gradient.T.astype(float)  # the first momentum has the direction of the gradient
            x /= np.linalg.norm(x)
            for _ in range(5):
                gram = x @ x.T
                x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
            wanted = -0.02 * max(1, x.shape[0] / x.shape[1]) ** 0.5 * x
            np.testing.assert_allclose(moved.T, wanted, atol=2e-6)


def test_a_sharded_update_is_the_same():
    """The matrices are split four ways, and each device orthogonalises whole matrices (test_muon.py)."""
    model, config = little_model(), muon_config()
    transformation = optimizer.make(config, model)

    @jax.jit
    def two_updates(params, grads):
        state = transformation.init(params)
        for step in (5, 6):
            updates, state = transformation.update(grads, state, params, step=jnp.int32(step))
            params = optax.apply_updates(params, updates)
        return params, state

    params, grads = random_tree(model.shapes, seed=0), random_tree(model.shapes, seed=1)
    mesh = mesh_lib.make_mesh((2, 2, 2))
    split = mesh_lib.shardings(model.axes, model.shapes, mesh)
    with mesh_lib.use_mesh(mesh):
        found = jax.device_get(two_updates(jax.device_put(params, split), jax.device_put(grads, split)))
    for (path, leaf), wanted in zip(
        jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(two_updates(params, grads)), strict=True
    ):
        np.testing.assert_allclose(leaf, wanted, atol=1e-5, err_msg=jax.tree_util.keystr(path))


# ---- which rule updates which parameter


@pytest.mark.parametrize("name", SMOKE)
def test_every_parameter_has_its_group(name):
    module, variant = CONFIGS[name]
    config = module.get_config(variant)
    nanochat_recipe.optimizer(config)
    model = models.build(config.model)
    labels = optimizer.groups(config, model)
    assert jax.tree.structure(labels) == jax.tree.structure(model.shapes)
    found = {}
    for path, label in jax.tree_util.tree_leaves_with_path(labels):
        found.setdefault(label, set()).add(jax.tree_util.keystr(path, simple=True, separator="."))
    assert found.keys() <= {"muon", "other", *optimizer.GROUPS}
    assert "embedding" in found["embedding"]
    for path in found["muon"]:
        names = path.split(".")
        assert names[-1] == "kernel" and not {"conv", "embedding", "head"} & set(names)
        assert not any(part.endswith("norm") or "scale" in part for part in names), path
    axes = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(model.axes, is_leaf=lambda leaf: isinstance(leaf, tuple))
    }
    kernels = {path for path, names in axes.items() if path.endswith("kernel") and len(names) == 2}
    assert {path for path in kernels if ".conv." not in path} - found["muon"] <= found.get("smear", set())


def test_a_group_without_values_uses_the_defaults():
    config = muon_config()
    config.optimizer.groups.embedding = ()
    config.optimizer.muon.excluded = ("conv", "value")
    labels = optimizer.groups(config, models.build(config.model))
    assert labels["embedding"] == "other"
    mixer = labels["groups"]["block_0"]["mixer"]
    assert mixer["value"]["kernel"] == "other" and mixer["key"]["kernel"] == "muon"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"optimizer.groups.head": (0.1, 0.9)}, r"groups.head=\(0.1, 0.9\): needs learning rate, b1, b2"),
        ({"optimizer.groups.head": (0.1, 1.0, 0.9, 0.0)}, "needs learning rate, b1, b2"),
        ({"optimizer.groups.head": (0.1, "x", 0.9, 0.0)}, "needs learning rate, b1, b2"),
        ({"optimizer.warmup_steps": 8}, "warmup_steps=8: must be at most 7, where the warm-down begins"),
    ],
)
def test_mistakes_are_one_line(overrides, message):
    with pytest.raises(UserError, match=message):
        muon_config(**overrides)


# ---- training steps


@functools.cache
def compiled(family, sizes=(1, 1, 1)):
    return build(muon_config(family), sizes)


def train(run, state, steps, *, batch=None):
    """Returns the state and the losses after some updates, each on its own batch unless one is given."""
    losses = []
    for _ in range(steps):
        seed = int(state["step"])
        state, metrics = update(run, state, ragged_batch(run.config, seed=seed) if batch is None else batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def test_the_state_of_muon_is_sharded_like_the_parameters():
    state = compiled("transformer", (2, 2, 2)).program.state
    muon = state["opt_state"][1].inner_states["muon"].inner_state[0]
    up = lambda tree: tree["groups"]["block_0"]["mlp"]["up"]["kernel"]
    assert up(muon.momentum).sharding == up(state["params"]).sharding
    layers, width, hidden = up(state["params"]).shape
    assert up(muon.second_moment).shape == (layers, 1, hidden)
    assert up(muon.second_moment).sharding.shard_shape((layers, 1, hidden)) == (layers, 1, hidden // 2)
    down = muon.second_moment["groups"]["block_0"]["mlp"]["down"]["kernel"]
    assert down.shape == (layers, hidden, 1)


def test_a_resumed_run_is_the_same(tmp_path):
    """It resumes from checkpoints in the middle of the warm-up and of the warm-down, and every bit is the same."""
    run = compiled("transformer")
    through, _ = train(run, fresh(run), 12)
    state, _ = train(run, fresh(run), 3)
    saved = checkpoint.Checkpoints(tmp_path)
    for step in (3, 9):
        saved.save(step, state, {})
        saved.wait()
        state = saved.restore(step, run.program.state)
        state, _ = train(run, state, 6 if step == 3 else 3)
    saved.close()
    assert_bitwise(jax.device_get(state), jax.device_get(through))


def test_a_step_that_is_not_finite_changes_nothing():
    run = compiled("transformer")
    state, _ = train(run, fresh(run), 2)
    before = jax.device_get(state)
    bad = ragged_batch(run.config)
    bad["weights"] = np.full_like(bad["weights"], np.inf)
    state, _ = train(run, state, 1, batch=bad)
    assert_bitwise(jax.device_get(state["params"]), before["params"])
    assert_bitwise(jax.device_get(state["opt_state"]), before["opt_state"])
    assert (int(state["step"]), int(state["skipped"])) == (3, 1)


def learns_by_heart(run):
    _, losses = train(run, fresh(run), 20, batch=ragged_batch(run.config))
    return np.isfinite(losses).all() and losses[-1] < losses[0] - 1


def test_muon_trains():
    assert learns_by_heart(compiled("transformer"))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKE)
def test_muon_trains_every_family(name):
    module, variant = CONFIGS[name]
    config = module.get_config(variant)
    nanochat_recipe.optimizer(config)
    config.steps = 20
    assert learns_by_heart(build(config))


# ---- schedules


def at(function, *steps):
    return [float(function(jnp.int32(step))) for step in steps]


def test_warmdown():
    config = muon_config()
    config.steps, config.optimizer.warmup_steps, config.optimizer.warmup_from = 1000, 40, 0.0
    rate = schedule.learning_rate(config, peak=0.5)
    assert at(rate, 0, 20, 40, 200, 350) == pytest.approx([0, 0.25, 0.5, 0.5, 0.5])
    assert at(rate, 675, 1000) == pytest.approx([0.5 * (1 + 0.05) / 2, 0.5 * 0.05])


def test_muon_momentum_and_decay():
    config = muon_config()
    config.steps, config.optimizer.muon.momentum_warmup_steps, config.optimizer.muon.weight_decay = 2000, 400, 0.28
    assert at(schedule.muon_momentum(config), 0, 200, 400, 700) == pytest.approx([0.85, 0.91, 0.97, 0.97])
    assert at(schedule.muon_momentum(config), 1350, 2000) == pytest.approx([0.935, 0.90])
    assert at(schedule.muon_weight_decay(config), 0, 1000, 2000) == pytest.approx([0.28, 0.14, 0.0], abs=1e-7)
    config.steps = 500  # the warm-up does not reach into the warm-down
    assert at(schedule.muon_momentum(config), 0, 175) == pytest.approx([0.85, 0.97])
    plain = muon_config(nanochat=False)
    assert at(schedule.muon_momentum(plain), 0, 1, 10, 20) == pytest.approx([0.95] * 4)
    assert at(schedule.muon_weight_decay(plain), 0, 20) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("layers", "dim", "ratio", "batch_tokens", "wanted"),
    [
        (12, 768, 12, None, (2520, 2**19, 0.02, 0.28, 0.3)),
        (20, 1280, 12, None, (4980, 2**20, 0.02 * 2**0.5, 0.28 * 2**0.5 / 3.9523, 0.3 * (2 * 768 / 1280) ** 0.5)),
        (20, 1280, 100, 2**19, (83_000, 2**19, 0.02, 0.28 / 3.9523, 0.3 * (768 / 1280) ** 0.5)),  # Maglev
    ],
)
def test_the_recipe_scales_with_the_run(layers, dim, ratio, batch_tokens, wanted):
    config = smoke_config("transformer")
    config.model.layers, config.model.dim, config.model.vocab_size = layers, dim, 32_768
    nanochat_recipe.recipe(config, ratio=ratio, batch_tokens=batch_tokens)
    muon, embedding = config.optimizer.muon, config.optimizer.groups.embedding
    found = (config.steps, config.data.batch_size * 2048, muon.learning_rate, muon.weight_decay, embedding[0])
    assert found == pytest.approx(wanted, rel=1e-4)
