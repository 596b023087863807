"""The language model: its loss, vocabulary padding, documents, decoding, memory use, initialisation and sizes.

B batch, T time, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import config as config_lib
from mesanet_jax import models
from mesanet_jax.remat import POLICIES
from tests.helpers.smoke import FAMILIES, assert_bitwise, ragged_batch, relative_distances, smoke_config

families = pytest.mark.parametrize("family", FAMILIES)
VOCAB = 500  # padded to 512
SHAPE = {"model.vocab_size": VOCAB, "data.seq_len": 48, "data.batch_size": 2, "model.norm_eps": 1e-3}


@functools.cache
def built(family):
    """(config, model, parameters) of a smoke model whose vocabulary is padded."""
    config = smoke_config(family, SHAPE)
    model = models.build(config.model)
    return config, model, jax.jit(model.init)(jax.random.key(0))


@functools.cache
def loss_and_gradients(family):
    """Jitted (params, batch) -> (nats [B,T], gradients of their sum)."""
    _, model, _ = built(family)

    def call(params, batch):
        def total(params):
            nats_BT = model.loss(params, batch)
            return jnp.sum(nats_BT), nats_BT

        grads, nats_BT = jax.grad(total, has_aux=True)(params)
        return nats_BT, grads

    return jax.jit(call)


@families
def test_the_loss_is_minus_log_softmax_of_decoded_logits(family):
    config, model, params = built(family)
    batch = ragged_batch(config) | {"segment_ids": np.zeros((2, 48), np.int32)}  # decoding reads one document
    logits_BTV, _ = jax.jit(model.extend)(params, batch["inputs"], model.init_state(params, 2, max_length=48))
    assert logits_BTV.shape == (2, 48, VOCAB) and logits_BTV.dtype == jnp.float32
    assert jnp.max(jnp.abs(logits_BTV)) < config.model.logit_softcap
    wanted_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch["targets"][..., None], axis=-1)[..., 0]
    nats_BT, _ = loss_and_gradients(family)(params, batch)
    np.testing.assert_allclose(nats_BT, wanted_BT * batch["weights"], rtol=1e-5)


@families
def test_prefill_equals_decoding_steps(family):
    config, model, params = built(family)
    tokens_BT = ragged_batch(config)["inputs"]
    extend, step = jax.jit(model.extend), jax.jit(model.decode_step)
    wanted_BTV, _ = extend(params, tokens_BT, model.init_state(params, 2, max_length=48))
    _, state = extend(params, tokens_BT[:, :40], model.init_state(params, 2, max_length=48))
    for time in range(40, 48):
        logits_BV, state = step(params, tokens_BT[:, time], state)
        np.testing.assert_allclose(logits_BV, wanted_BTV[:, time], atol=2e-5)


@families
def test_weights_of_zero_remove_loss_and_gradient(family):
    config, _, params = built(family)
    batch = ragged_batch(config)
    nats_BT, grads = loss_and_gradients(family)(params, batch | {"weights": np.zeros((2, 48), np.float32)})
    assert not nats_BT.any() and not any(leaf.any() for leaf in jax.tree.leaves(grads))
    nats_BT, _ = loss_and_gradients(family)(params, batch)
    np.testing.assert_array_equal(nats_BT > 0, batch["weights"] > 0)


@families
def test_padding_of_the_vocabulary_has_no_effect(family):
    """Padding rows have no gradient, and their values change neither loss nor gradients."""
    config, _, params = built(family)
    batch = ragged_batch(config)
    nats_BT, grads = loss_and_gradients(family)(params, batch)
    assert grads["embedding"].shape == (512, config.model.dim)
    assert not grads["embedding"][VOCAB:].any() and grads["embedding"][:VOCAB].any(axis=-1).all()
    changed = params | {"embedding": params["embedding"].at[VOCAB:].set(100.0)}
    assert_bitwise((nats_BT, grads), loss_and_gradients(family)(changed, batch))


@families
@pytest.mark.parametrize("resets", [True, False], ids=["resets", "no_resets"])
def test_documents(family, resets):
    """With another second document, the losses and gradients of the others are bitwise equal, unless resets are off."""
    config, _, params = built(family)
    model = models.build(smoke_config(family, SHAPE | {"model.reset_at_documents": resets}).model)
    segments_BT = np.repeat([0, 1, 2], [16, 16, 16])[None].repeat(2, axis=0).astype(np.int32)
    batch = ragged_batch(config) | {"segment_ids": segments_BT}
    batch["weights"] = (segments_BT != 1).astype(np.float32)  # so that only the losses of the others have gradients
    other = batch | {"inputs": np.where(segments_BT == 1, ragged_batch(config, seed=1)["inputs"], batch["inputs"])}
    call = jax.jit(lambda batch: model.loss(params, batch))
    before_BT, after_BT = call(batch), call(other)
    np.testing.assert_array_equal(before_BT[:, :16], after_BT[:, :16])
    assert (before_BT[:, 32:] == after_BT[:, 32:]).all() == resets
    if resets:
        _, before = loss_and_gradients(family)(params, batch)
        _, after = loss_and_gradients(family)(params, other)
        assert_bitwise(before, after)


@families
def test_remat_saves_memory_and_changes_nothing(family):
    """In the order of the config's choices, temporary memory never grows; loss and gradients stay the same."""
    shape = {"data.seq_len": 64, "data.batch_size": 2, "model.layers": 24, "model.norm_eps": 1e-3}
    policies = config_lib.schema("language_model", ("mesa",))["model"]["remat"].choices
    assert policies == ("none", *POLICIES)
    config = smoke_config(family, shape)
    params, batch = jax.jit(models.build(config.model).init)(jax.random.key(0)), ragged_batch(config)
    results, memory = [], []
    for policy in policies:
        model = models.build(smoke_config(family, shape | {"model.remat": policy}).model)
        call = jax.value_and_grad(lambda params, batch: jnp.sum(model.loss(params, batch)))
        compiled = jax.jit(call).lower(params, batch).compile()
        memory.append(compiled.memory_analysis().temp_size_in_bytes)
        results.append(compiled(params, batch))
    assert memory == sorted(memory, reverse=True) and memory[-1] < 0.5 * memory[0], memory
    for loss, grads in results[1:]:
        np.testing.assert_allclose(loss, results[0][0], rtol=1e-6)
        distances = relative_distances(grads, results[0][1])
        assert max(distances.values()) < 2e-5, distances  # float32 through 24 layers, in another order


@families
def test_layers_without_a_loop_change_nothing(family):
    """Also with a policy that recomputes."""
    shape = SHAPE | {"model.layers": 4, "model.remat": "mixer", "model.norm_eps": 1e-3}
    config = smoke_config(family, shape)
    params, batch = jax.jit(models.build(config.model).init)(jax.random.key(0)), ragged_batch(config)
    results, programs = [], []
    for looped in (True, False):
        model = models.build(smoke_config(family, shape | {"model.scan_layers": looped}).model)
        call = jax.jit(jax.value_and_grad(lambda params, batch: jnp.sum(model.loss(params, batch))))
        results.append(call(params, batch))
        programs.append(call.lower(params, batch).as_text())
    np.testing.assert_allclose(results[1][0], results[0][0], rtol=1e-6)
    distances = relative_distances(results[1][1], results[0][1])
    assert max(distances.values()) < 2e-5, distances
    assert len(programs[1]) > 1.5 * len(programs[0])  # since it contains each layer


@families
def test_bfloat16_activations(family):
    config, _, params = built(family)
    model = models.build(smoke_config(family, SHAPE | {"model.compute_dtype": "bfloat16"}).model)
    loss = lambda params, batch: jnp.sum(model.loss(params, batch))
    nats, grads = jax.jit(jax.value_and_grad(loss))(params, ragged_batch(config))
    wanted_BT, _ = loss_and_gradients(family)(params, ragged_batch(config))
    np.testing.assert_allclose(nats, wanted_BT.sum(), rtol=3e-3)
    assert all(leaf.dtype == jnp.float32 and jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))


@families
def test_initialisation(family):
    """MesaNet, appendix G: the stream has variance 1, weights 1 / fan-in, or 2 / (layers x fan-in) into the stream."""
    config = smoke_config(family, {"model.dim": 128, "model.layers": 4, "model.heads": 4, "model.head_dim": 32})
    model = models.build(config.model)
    params = jax.jit(model.init)(jax.random.key(1))
    block = params["groups"]["block_0"]
    assert jnp.var(params["embedding"]) * 128 == pytest.approx(1, rel=0.05)
    for kernel, scale in (
        (block["mixer"]["query"]["kernel"], 1), (block["mixer"]["value"]["kernel"], 1),
        (block["mlp"]["up"]["kernel"], 1), (block["mixer"]["out"]["kernel"], 2 / 4),
        (block["mlp"]["down"]["kernel"], 2 / 4),
    ):  # fmt: skip
        assert jnp.var(kernel) * kernel.shape[1] == pytest.approx(scale, rel=0.05)
        assert len({leaf.tobytes() for leaf in np.asarray(kernel)}) == 4
    stream_BTD = model.bind(params).embed(jnp.arange(512)[None])
    assert jnp.var(stream_BTD) == pytest.approx(1, rel=0.05)


# Exact counts, so that any change of the model shows, and what the paper's sizes amount to (MesaNet, arXiv 2506.05233,
# appendix G: 140M, 440M and 940M).
COUNTS = {"140m": 146_195_368, "440m": 433_924_032, "1b": 937_489_568}
PUBLISHED = {"140m": 146.2e6, "440m": 433.9e6, "1b": 937.5e6}


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts(size):
    count = models.build(FAMILIES["mesanet"].get_config(size).model).parameter_count()
    assert count == COUNTS[size]
    assert round(count / 1e5) == round(PUBLISHED[size] / 1e5)
    attention = models.build(FAMILIES["transformer"].get_config(size).model).parameter_count()
    assert attention == pytest.approx(count, rel=0.02)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_padding_is_not_counted_as_parameters(tied):
    counts = [
        models.build(
            smoke_config("mesanet", {"model.vocab_size": vocab, "model.tie_embeddings": tied}).model
        ).parameter_count()
        for vocab in (385, 512)
    ]
    assert counts[1] - counts[0] == (512 - 385) * 32 * (1 if tied else 2)


def test_pattern_alternates_mixers():
    """Two groups of (attention, mesa): the stacked parameters are per group, and training equals decoding."""
    config = config_lib.load(
        "configs/mesanet.py:smoke",
        {"model.pattern": "attention,mesa", "model.layers": "4", "model.norm_eps": "1e-3", "data.batch_size": "2"},
    )
    model = models.build(config.model)
    params = jax.jit(model.init)(jax.random.key(0))
    assert "rope_base" in config.model.attention and "lambda_raw" in params["groups"]["block_1"]["mixer"]
    assert params["groups"]["block_0"]["mixer"]["query"]["kernel"].shape[0] == 2
    batch = ragged_batch(config) | {"segment_ids": np.zeros((2, 64), np.int32), "weights": np.ones((2, 64), np.float32)}
    logits_BTV, _ = jax.jit(model.extend)(params, batch["inputs"], model.init_state(params, 2, max_length=64))
    wanted_BT = -jnp.take_along_axis(jax.nn.log_softmax(logits_BTV), batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(jax.jit(model.loss)(params, batch), wanted_BT, rtol=1e-5)
