"""Scaled cosine attention against its definition.

B batch, T time, D model width, H query heads, K head size.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mesanet_jax import config as config_lib
from mesanet_jax.mixers.attention import Attention

T, D, H, K = 19, 24, 4, 8


def layer(log_temperature_H, **options):
    model = config_lib.default_config(("attention",)).model
    model.dim, model.layers, model.heads, model.head_dim = D, 2, H, K
    model.attention.update({"cosine": True, "kv_heads": 2, **options})
    made = Attention(model, rngs=nnx.Rngs(params=0))
    np.testing.assert_allclose(made.log_temperature[...], np.log(model.attention.temperature_init), rtol=1e-6)
    made.log_temperature[...] = jnp.array(log_temperature_H, jnp.float32)
    return made


def run(made, x_TD):
    return np.asarray(made(jnp.asarray(x_TD, jnp.float32)[None], jnp.zeros((1, T), jnp.int32))[0])


def rotated(x_THK):
    angle_T1F = np.arange(T)[:, None, None] * 10_000.0 ** (-np.arange(K // 2) / (K // 2))
    turned = (x_THK[..., : K // 2] + 1j * x_THK[..., K // 2 :]) * np.exp(1j * angle_T1F)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def test_scaled_cosine_attention_is_its_definition():
    """softmax(tau_h cos(q, k)) v in float64, tau_h = exp(min(s_h, ln 100)); two query heads share each key head."""
    scores_H = np.array([0.0, 1.0, np.log(100), 9.0])
    made, x_TD = layer(scores_H), np.random.default_rng(0).standard_normal((T, D))
    heads = lambda linear: (x_TD @ np.asarray(linear.kernel[...], np.float64)).reshape(T, -1, K)
    q_THK, k_THK = rotated(heads(made.query)), np.repeat(rotated(heads(made.key)), 2, axis=1)
    v_THK = np.repeat(heads(made.value), 2, axis=1)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    temperature_H11 = np.exp(np.minimum(scores_H, np.log(100)))[:, None, None]
    logits_HTS = temperature_H11 * np.einsum("thk,shk->hts", unit(q_THK), unit(k_THK))
    weights_HTS = np.exp(logits_HTS) * np.tri(T)
    weights_HTS /= weights_HTS.sum(axis=-1, keepdims=True)
    o_THK = np.einsum("hts,shk->thk", weights_HTS, v_THK)
    wanted_TD = o_THK.reshape(T, -1) @ np.asarray(made.out.kernel[...], np.float64)
    assert np.linalg.norm(run(made, x_TD) - wanted_TD) < 2e-5 * np.linalg.norm(wanted_TD)


def test_lengths_of_queries_and_keys_do_not_matter():
    made, x_TD = layer([1.0] * H), np.random.default_rng(0).standard_normal((T, D))
    before = run(made, x_TD)
    for linear in (made.query, made.key):
        linear.kernel[...] *= 7.0
    np.testing.assert_allclose(run(made, x_TD), before, atol=1e-5)


@pytest.mark.parametrize(("score", "moves"), [(1.0, True), (5.0, False)])
def test_the_temperature_has_a_gradient_below_its_bound_only(score, moves):
    graphdef, state = nnx.split(layer([score] * H))
    x_BTD = jnp.asarray(np.random.default_rng(0).standard_normal((1, T, D)), jnp.float32)
    total = lambda state: jnp.sum(nnx.merge(graphdef, state)(x_BTD, jnp.zeros((1, T), jnp.int32)) ** 2)
    assert (np.abs(jax.grad(total)(state)["log_temperature"][...]) > 1e-6).all() == moves
