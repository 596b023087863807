"""A number of layers that is not a multiple of the pattern: the blocks of the tail are blocks like all others.

B batch, T time.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import gated_deltanet, gla, griffin, mamba2, xlstm
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.remat import POLICIES
from mesanet_jax.training import step as step_lib
from tests.helpers.smoke import ragged_batch, relative_distances, smoke_config

SHAPE = {"model.layers": 5, "data.batch_size": 2, "data.seq_len": 24, "model.norm_eps": 1e-3}


def build(pattern, **overrides):
    config = smoke_config("transformer", SHAPE | overrides)
    config.model.pattern = pattern
    config_lib.validate(config)
    return config, models.build(config.model)


def as_tail(params):
    """The parameters of five scanned blocks, as one period of three blocks and a tail of two."""
    blocks = [jax.tree.map(lambda leaf: leaf[index], params["groups"]["block_0"]) for index in range(5)]
    groups = {f"block_{index}": jax.tree.map(lambda leaf: leaf[None], blocks[index]) for index in range(3)}
    return params | {"groups": groups, "tail": {f"block_{index}": blocks[3 + index] for index in range(2)}}


@pytest.mark.parametrize(
    "policy",
    ["none", *(pytest.param(policy, marks=() if policy == "mixer" else pytest.mark.slow) for policy in POLICIES)],
)
def test_a_tail_computes_what_groups_do(policy):
    """Five equal blocks give the same when scanned over, and with three in a period and two in the tail."""
    config, scanned = build(("attention",))
    _, tailed = build(("attention",) * 3, **{"model.remat": policy})
    params, batch = jax.jit(scanned.init)(jax.random.key(0)), ragged_batch(config)
    loss_and_grads = lambda model: jax.jit(jax.value_and_grad(lambda *inputs: jnp.sum(model.loss(*inputs))))
    loss, grads = loss_and_grads(scanned)(params, batch)
    other_loss, other_grads = loss_and_grads(tailed)(as_tail(params), batch)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    assert max(relative_distances(other_grads, as_tail(grads)).values()) < 1e-5
    assert tailed.parameter_count() == scanned.parameter_count()
    assert tailed.flops_per_token(24).training == pytest.approx(scanned.flops_per_token(24).training)


def test_initialisation_of_a_tail():
    """A tail is drawn like the other blocks and differs from them; it does not change how these are drawn."""
    _, tailed = build(("attention", "attention"))
    _, whole = build(("attention", "attention"), **{"model.layers": 4})
    params, without = (jax.jit(model.init)(jax.random.key(0)) for model in (tailed, whole))
    assert jax.tree.structure(tailed.shapes) == jax.tree.structure(params)
    query = lambda group: np.asarray(group["block_0"]["mixer"]["query"]["kernel"])
    np.testing.assert_array_equal(query(params["groups"]), query(without["groups"]))
    assert (
        "tail" not in without
        and len({kernel.tobytes() for kernel in (*query(params["groups"]), query(params["tail"]))}) == 3
    )
    assert np.var(query(params["tail"])) == pytest.approx(1 / 32, rel=0.1)


def test_griffin_trains_as_it_decodes():
    """hawk, hawk, sliding, hawk: the logits of prefill and decoding steps give the loss."""
    config = griffin.get_config("smoke")
    config.data.batch_size, config.model.norm_eps = 2, 1e-3
    model = models.build(config.model)
    params = jax.jit(model.init)(jax.random.key(0))
    assert set(params["tail"]) == {"block_0"} and "lambda_raw" in params["tail"]["block_0"]["mixer"]
    batch = ragged_batch(config) | {"segment_ids": np.zeros((2, 64), np.int32), "weights": np.ones((2, 64), np.float32)}
    state = jax.jit(lambda params: model.init_state(params, 2, max_length=64))(params)
    logits, state = jax.jit(model.extend)(params, batch["inputs"][:, :50], state)
    logits, step = [logits], jax.jit(model.decode_step)
    for time in range(50, 64):
        one, state = step(params, batch["inputs"][:, time], state)
        logits.append(one[:, None])
    scores = jax.nn.log_softmax(jnp.concatenate(logits, axis=1))
    wanted_BT = -jnp.take_along_axis(scores, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch), wanted_BT, rtol=2e-5, atol=2e-5)


def first_step(config, sizes):
    """(metrics, updated parameters) of one update on a mesh."""
    mesh = mesh_lib.make_mesh(sizes, jax.devices()[: np.prod(sizes)])
    with mesh_lib.use_mesh(mesh):
        program = step_lib.compile_program(config, models.build(config.model), mesh)
        batch = mesh_lib.place_batch(ragged_batch(config), mesh)
        state, metrics = program.train(program.init(jax.random.key(0)), batch)
    return jax.device_get(metrics), state["params"]


@pytest.mark.slow
def test_griffin_on_a_mesh():
    """The tail's parameters are sharded like those of the groups, and the update does not depend on sharding."""
    config = griffin.get_config("smoke")
    config.model.norm_eps = 1e-3
    one, _ = first_step(config, (1, 1, 1))
    other, params = first_step(config, (2, 2, 2))
    kernel = params["tail"]["block_0"]["mlp"]["up"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0] // 2, kernel.shape[1] // 2)
    for name in ("loss", "grad_norm"):
        assert np.isfinite(one[name])
        np.testing.assert_allclose(one[name], other[name], rtol=5e-6)


@pytest.mark.slow  # tests/models/test_zoo.py checks their losses
@pytest.mark.parametrize("family", [gated_deltanet, gla, mamba2, xlstm], ids=lambda family: family.__name__)
def test_a_step_of_the_published_forms(family):
    metrics, params = first_step(family.get_config("smoke-published"), (1, 1, 1))
    assert 0 < metrics["loss"] < 10 and 0 < metrics["grad_norm"] < 10
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(jax.device_get(params)))
