"""The families of MesaNet's comparison: each computes its row of Table 1, and everything else is the same.

B batch, T time, D model width, H heads, K head size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import deltanet, gated_deltanet, gla, mamba2, mesanet
from mesanet_jax import config as config_lib
from mesanet_jax import schema
from mesanet_jax.mixers import MIXERS
from mesanet_jax.recipes import backbone

CONFIGS = {"gla": gla, "mamba2": mamba2, "deltanet": deltanet, "gated_deltanet": gated_deltanet}
families = pytest.mark.parametrize("family", CONFIGS)


def mixer_of(family, *, dim=24, heads=2, head_dim=8, **options):
    model = config_lib.default_config((family,)).model
    model.dim, model.layers, model.heads, model.head_dim = dim, 2, heads, head_dim
    model[family].update(options)
    return MIXERS[family](model, rngs=nnx.Rngs(params=0))


def gla_update(G, k, v, gamma, beta):
    return gamma * G + beta * np.outer(v, k)


def mamba2_update(G, k, v, gamma, beta):
    return gamma * G + np.outer(v, k)


def deltanet_update(G, k, v, gamma, beta):
    return G @ (np.eye(k.size) - beta * np.outer(k, k)) + beta * np.outer(v, k)


def gated_deltanet_update(G, k, v, gamma, beta):
    return gamma * G @ (np.eye(k.size) - beta * np.outer(k, k)) + beta * np.outer(v, k)


UPDATES = {
    "gla": gla_update,
    "mamba2": mamba2_update,
    "deltanet": deltanet_update,
    "gated_deltanet": gated_deltanet_update,
}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def as_published(mixer, update, x_TD):
    """MesaNet's appendix E.1 in NumPy and float64, for one row, without any code of the mixer."""
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(nnx.state(mixer)))
    heads, size = mixer.heads, mixer.key_size
    linear = lambda name: x_TD @ weights[name]["kernel"] + weights[name].get("bias", 0.0)

    def activated(name, taps_WC):
        padded = np.concatenate([np.zeros((len(taps_WC) - 1, heads * size)), linear(name)])
        x_TC = sum(tap_C * padded[i : i + len(x_TD)] for i, tap_C in enumerate(taps_WC))
        return (x_TC * sigmoid(x_TC)).reshape(-1, heads, size)

    unit = lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
    q_THK = unit(activated("query", weights["conv_q"]))
    k_THK = unit(activated("key", weights["conv_k"]))
    v_THK = linear("value").reshape(-1, heads, size)
    gate = lambda name: sigmoid(linear(name)) if name in weights else np.full((len(x_TD), heads), np.nan)
    gamma_TH, beta_TH = gate("decay_gate"), gate("input_gate")

    o_THK = np.zeros_like(v_THK)
    for head in range(heads):
        G = np.zeros((size, size))
        for t in range(len(x_TD)):
            G = update(G, k_THK[t, head], v_THK[t, head], gamma_TH[t, head], beta_TH[t, head])
            o_THK[t, head] = G @ q_THK[t, head]
    o_THK = o_THK / np.sqrt((o_THK**2).mean(-1, keepdims=True) + mixer.norm.eps) * weights["norm"]["scale"]
    return o_THK.reshape(len(x_TD), -1) @ weights["out"]["kernel"]


@families
def test_layer_is_the_published_one(family):
    """A gate that a row of Table 1 does not have is NaN in the NumPy layer, so that using it would be noticed."""
    mixer = mixer_of(family)
    x_BTD = jax.random.normal(jax.random.key(1), (1, 21, 24))
    y_BTD = jax.jit(lambda mixer, x: mixer(x, jnp.zeros(x.shape[:2], jnp.int32)))(mixer, x_BTD)
    wanted_TD = as_published(mixer, UPDATES[family], np.asarray(x_BTD[0], np.float64))
    assert np.linalg.norm(y_BTD[0] - wanted_TD) < 1e-5 * np.linalg.norm(wanted_TD)


@pytest.mark.parametrize("size", backbone.SIZES)
@families
def test_configs_differ_from_mesanet_in_the_mixer_alone(family, size):
    config = CONFIGS[family].get_config(size)
    config_lib.validate(config)
    ours, mesa = schema.flatten(config), schema.flatten(mesanet.get_config(size))
    differing = {path for path in ours.keys() | mesa.keys() if ours.get(path) != mesa.get(path)}
    mixers = {path for path in differing if path.startswith(("model.mesa.", f"model.{family}."))}
    assert differing - mixers <= {"name", "model.pattern", "optimizer.learning_rate"}
