"""Small models with a memory and random weights (in fresh ones, projections into the stream are zero).

B batch, T time.
"""

import jax
import numpy as np

from mesanet_jax import config as config_lib
from mesanet_jax import models
from tests.helpers.smoke import ragged_batch

B, T = 2, 20
DOCUMENTS = np.repeat([[0, 1, 2]], [7, 4, 9], axis=1).repeat(B, axis=0).astype(np.int32)
ONE_DOCUMENT = np.zeros((B, T), np.int32)


def small_config(module, size: str = "smoke", **values):
    """The validated smoke config of a config module, made smaller, with some values of its model changed."""
    config = module.get_config(size)
    config.data.seq_len, config.data.batch_size = T, B
    model = config.model
    model.layers, model.vocab_size, model.vocab_multiple, model.window = len(model.pattern) + 1, 60, 64, 5
    if model.kind in ("maglev", "lrt"):
        model.layers, model.sweep_tolerance = 3, 1e-6
    for name, value in values.items():
        config.model[name] = value
    config_lib.validate(config)
    return config


def noisy(params, *, seed: int = 1, scale: float = 0.1):
    """The parameters with noise added to all of them."""
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        tree, [leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys)]
    )


def build(module, size: str = "smoke", **values):
    """(config, model, noisy parameters)."""
    config = small_config(module, size, **values)
    model = models.build(config.model)
    return config, model, noisy(jax.jit(model.init)(jax.random.key(0)))


def batch_of(config, segment_ids_BT=ONE_DOCUMENT, *, seed: int = 0) -> dict:
    """A batch of random tokens, all with weight 1."""
    batch = ragged_batch(config, seed=seed)
    return batch | {"segment_ids": segment_ids_BT, "weights": np.ones((B, T), np.float32)}
