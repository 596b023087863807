"""Every shipped family as a whole model: training equals decoding, documents stay apart, decoding states stay small.

B batch, T time, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mesanet_jax import models
from tests.helpers.smoke import FAMILIES, ragged_batch
from tests.test_golden_configs import CONFIGS

LENGTH = 90  # not a multiple of the chunk size, 64
PREFILL = 70  # the other tokens are read by decoding steps
DOCUMENTS = np.repeat([[0, 1, 2]], [30, 33, 27], axis=1).repeat(2, axis=0).astype(np.int32)
ALL = [name for name in CONFIGS if "-smoke" in name]
families = pytest.mark.parametrize("family", ALL)
# The families that tests/models/test_language_model.py does not check in the same way.
others = pytest.mark.parametrize("family", [name for name in ALL if name.removesuffix("-smoke") not in FAMILIES])


@functools.cache
def built(family):
    """(config, model, parameters, jitted loss) of a smoke config."""
    module, variant = CONFIGS[family]
    config = module.get_config(variant)
    config.data.seq_len, config.data.batch_size = LENGTH, 2
    config.model.norm_eps = 1e-3  # keeps the first outputs of a document well conditioned
    model = models.build(config.model)
    return config, model, jax.jit(model.init)(jax.random.key(0)), jax.jit(model.loss)


def batch_of(config, segments_BT, *, seed=0):
    return ragged_batch(config, seed=seed) | {"segment_ids": segments_BT, "weights": np.ones((2, LENGTH), np.float32)}


@others
def test_the_loss_is_that_of_decoding(family):
    """The logits of a prefill and of decoding steps after it give the loss of the whole row."""
    config, model, params, loss = built(family)
    batch = batch_of(config, np.zeros((2, LENGTH), np.int32))

    @jax.jit
    def decode(params, tokens_BT):
        state = model.init_state(params, 2, max_length=LENGTH)
        prefill_BTV, state = model.extend(params, tokens_BT[:, :PREFILL], state)

        def step(state, tokens_B):
            logits_BV, state = model.decode_step(params, tokens_B, state)
            return state, logits_BV

        _, rest_TBV = jax.lax.scan(step, state, tokens_BT[:, PREFILL:].T)
        return jnp.concatenate([prefill_BTV, jnp.moveaxis(rest_TBV, 0, 1)], axis=1)

    scores_BTV = jax.nn.log_softmax(decode(params, batch["inputs"]))
    wanted_BT = -jnp.take_along_axis(scores_BTV, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss(params, batch), wanted_BT, rtol=2e-5)


@others
def test_no_document_reads_another(family):
    """Other tokens in the second of three documents leave the losses of the others bitwise the same."""
    config, _, params, loss = built(family)
    batch, other = (batch_of(config, DOCUMENTS, seed=seed) for seed in (0, 1))
    mixed = batch | {"inputs": np.where(DOCUMENTS == 1, other["inputs"], batch["inputs"])}
    before_BT, after_BT = np.asarray(loss(params, batch)), np.asarray(loss(params, mixed))
    np.testing.assert_array_equal(before_BT[DOCUMENTS != 1], after_BT[DOCUMENTS != 1])
    assert (before_BT[DOCUMENTS == 1] != after_BT[DOCUMENTS == 1]).mean() > 0.9


@families
def test_the_state_does_not_grow_with_the_text(family):
    """Except with full attention, which keeps the keys and values of all tokens; a window keeps only its own."""
    module, variant = CONFIGS[family]
    config = module.get_config(variant)
    model = models.build(config.model)

    def state_bytes(length):
        state = jax.eval_shape(lambda params: model.init_state(params, 1, max_length=length), model.shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    a_token = state_bytes(65) - state_bytes(64)
    assert (a_token > 0) == ("attention" in config.model.pattern)
    assert state_bytes(32_768) - state_bytes(64) == (32_768 - 64) * a_token
