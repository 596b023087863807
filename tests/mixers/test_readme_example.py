"""The README's example of a new family, added as it says: one mixer file, one registry line, one config."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import config as config_lib
from mesanet_jax import models
from mesanet_jax.mixers import MIXERS
from tests.helpers.smoke import ROOT, ragged_batch


@pytest.fixture(scope="module")
def average(tmp_path_factory):
    """The model of the example's smoke config and that config."""
    mixer_code, config_code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    directory = tmp_path_factory.mktemp("example")
    mixer_file, config_file = directory / "average.py", directory / "configs" / "average.py"
    config_file.parent.mkdir()
    mixer_file.write_text(mixer_code)
    config_file.write_text(config_code)
    spec = importlib.util.spec_from_file_location("average", mixer_file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    MIXERS["average"] = module.Average
    try:
        config = config_lib.load(f"{config_file}:smoke", {"model.average.decay_init": "1.5"})
        yield models.build(config.model), config
    finally:
        del MIXERS["average"]


def test_it_has_its_fields_and_a_cost(average):
    model, config = average
    assert config.name == "average-smoke" and config.model.average.decay_init == 1.5
    assert model.parameter_count() > 0 and model.flops_per_token(64).training > 0


def test_training_equals_prefill_and_steps(average):
    model, config = average
    params = jax.jit(model.init)(jax.random.key(0))
    batch = ragged_batch(config) | {"segment_ids": np.zeros((8, 64), np.int32), "weights": np.ones((8, 64), np.float32)}
    nats = jax.jit(model.loss)(params, batch)
    state = model.init_state(params, 8, max_length=64)
    logits, state = jax.jit(model.extend)(params, jnp.asarray(batch["inputs"][:, :40]), state)
    step = jax.jit(model.decode_step)
    logits = [logits]
    for position in range(40, 64):
        one, state = step(params, jnp.asarray(batch["inputs"][:, position]), state)
        logits.append(one[:, None])
    scores = jax.nn.log_softmax(jnp.concatenate(logits, axis=1))
    picked = -jnp.take_along_axis(scores, jnp.asarray(batch["targets"])[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(nats, picked, rtol=2e-5, atol=2e-5)


def test_nothing_leaks_between_documents(average):
    model, config = average
    params = jax.jit(model.init)(jax.random.key(0))
    segments = np.repeat(np.arange(2), 32)[None].repeat(8, 0).astype(np.int32)
    batch = ragged_batch(config) | {"segment_ids": segments}
    other = batch | {"inputs": np.where(segments == 0, (batch["inputs"] + 1) % 512, batch["inputs"])}
    loss = jax.jit(model.loss)
    np.testing.assert_array_equal(loss(params, batch)[:, 32:], loss(params, other)[:, 32:])
