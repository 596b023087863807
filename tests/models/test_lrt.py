"""LRT: its two training schedules, and what each must equal in its limits.

B batch, T time.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lrt, maglev
from mesanet_jax import models
from mesanet_jax.errors import UserError
from tests.helpers.memory_models import DOCUMENTS, B, T, batch_of, build, small_config
from tests.helpers.smoke import relative_distances

SHORT = 6  # tokens of rows in which each position is a turn of its own


@functools.cache
def built(**values):
    """(config, model, parameters, jitted objective)."""
    config, model, params = build(lrt, **values)
    return config, model, params, jax.jit(model.objective)


def value_and_grad(model):
    return jax.jit(jax.value_and_grad(lambda params, batch: model.objective(params, batch)[0].sum()))


def one_turn_and_one_refinement():
    """(parameters, batch, the two models): S = 1 and K = 1 both compute whole rows once more, by different code."""
    config, turned, params, _ = built(turns=1)
    _, refined, _, _ = built(schedule="refined", refinements=1)
    return params, batch_of(config, DOCUMENTS), (turned, refined)


def test_one_turn_is_one_refinement():
    params, batch, pair = one_turn_and_one_refinement()
    one_BT, two_BT = (jax.jit(model.objective)(params, batch)[0] for model in pair)
    np.testing.assert_allclose(one_BT, two_BT, rtol=1e-6)


@pytest.mark.slow
def test_one_turn_has_the_gradients_of_one_refinement():
    params, batch, pair = one_turn_and_one_refinement()
    (one, one_grads), (two, two_grads) = (value_and_grad(model)(params, batch) for model in pair)
    np.testing.assert_allclose(one, two, rtol=1e-6)
    assert max(relative_distances(one_grads, two_grads).values()) < 1e-5


@pytest.mark.parametrize(
    "values",
    [{"turns": SHORT}, pytest.param({"schedule": "refined", "refinements": SHORT - 1}, marks=pytest.mark.slow)],
    ids=str,
)
def test_as_many_passes_as_tokens_are_the_recurrence(values):
    """With one turn per position, or T - 1 refinements, the last pass of training computes what decoding does."""
    config, model, params, _ = built(**values)
    batch = {name: x[:, 5 : 5 + SHORT] for name, x in batch_of(config, DOCUMENTS).items()}
    assert len(np.unique(batch["segment_ids"])) > 1
    deployed_BT, others, _ = jax.jit(model.scores)(params, batch)
    np.testing.assert_allclose(others["lifted"], deployed_BT, atol=1e-5)


@pytest.mark.parametrize(
    "values", [{}, pytest.param({"schedule": "refined"}, marks=pytest.mark.slow)], ids=["interleaved", "refined"]
)
def test_training_is_causal_and_keeps_documents_apart(values):
    config, _, params, objective = built(**values)
    batch, other = (batch_of(config, DOCUMENTS, seed=seed) for seed in (0, 1))
    later = batch | {"inputs": np.where(np.arange(T) >= 14, other["inputs"], batch["inputs"])}
    first = batch | {"inputs": np.where(DOCUMENTS == 0, other["inputs"], batch["inputs"])}
    (one_BT, _), (later_BT, _), (first_BT, _) = (objective(params, x) for x in (batch, later, first))
    np.testing.assert_array_equal(one_BT[:, :14], later_BT[:, :14])
    np.testing.assert_array_equal(one_BT[DOCUMENTS > 0], first_BT[DOCUMENTS > 0])
    assert (one_BT != later_BT)[:, 14:].all() and (one_BT != first_BT)[DOCUMENTS == 0].all()


def test_the_objective_is_the_mean_of_the_passes():
    """Interleaved: one pass without a memory and S turns, each with a mean over its own T / S tokens."""
    config, _, params, objective = built()
    _, _, _, once_refined = built(schedule="refined", refinements=1)
    batch = batch_of(config)
    total_BT, parts = objective(params, batch)
    both_BT, last = once_refined(params, batch)
    first_BT = 2 * both_BT - last["cross_entropy"]
    np.testing.assert_allclose(total_BT, (first_BT + 2 * parts["cross_entropy"]) / 3, rtol=1e-5)


def test_deployed_loss_is_that_of_decoding():
    config, model, params, _ = built()
    batch = batch_of(config)

    @jax.jit
    def decode(params, tokens_BT):
        return model.extend(params, tokens_BT, model.init_state(params, B, max_length=T))[0]

    logits_BTV = decode(params, batch["inputs"])
    wanted_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch), wanted_BT, atol=2e-5)


def test_turns_must_divide_the_row():
    config, model, params, _ = built(turns=3)
    with pytest.raises(UserError, match="model.turns=3: must divide the 20 tokens of a row"):
        model.objective(params, batch_of(config))


def test_sizes_and_costs():
    """d20 adds 65.5M in W_k and W_v, two gates per head on 32 channels, and one scalar per layer.

    Training takes two passes, or 1 + K with refinements.
    """
    model = lambda size: models.build(lrt.get_config(size).model)
    sliding = models.build(maglev.get_config("d20-sliding").model)
    assert model("d20").parameter_count() - sliding.parameter_count() == 65_536_000 + 20 * (2 * 32 * 10 + 1)
    passes = {size: model(size).flops_per_token(2048) for size in ("d20", "d20-k2", "d20-k3")}
    for size, count in (("d20", 2), ("d20-k2", 3), ("d20-k3", 4)):
        assert passes[size].training == pytest.approx(3 * count * passes[size].forward)
    assert small_config(lrt).model.mix_keys == "raw" and small_config(lrt).model.memory_scale_init == 0.1
