"""What only GSS has: its equations, its parameters, its initial modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import gss as configs_gss
from mesanet_jax import config as config_lib
from mesanet_jax import models
from mesanet_jax.errors import UserError
from mesanet_jax.mixers import gss
from mesanet_jax.training import optimizer

E, F, H, N = 16, 24, 6, 64


def mixer(**options):
    model = config_lib.default_config(("gss",)).model
    model.dim, model.layers = E, 2
    model.gss.update(options)
    return gss.GSS(model, rngs=nnx.Rngs(params=0))


def test_the_layer_is_its_equations():
    """The pseudocode of the GSS paper in float64, with the convolution as a sum over all earlier tokens."""
    layer, length = mixer(), 20
    x_TE = np.random.default_rng(0).standard_normal((length, E))
    weight = lambda linear: np.asarray(linear.kernel[...], np.float64)
    gelu = lambda x: np.asarray(jax.nn.gelu(jnp.asarray(x)), np.float64)
    v_TH = gelu(x_TE @ weight(layer.value))
    v_TH = (v_TH - v_TH.mean(-1, keepdims=True)) / np.sqrt(v_TH.var(-1, keepdims=True) + 1e-6)

    a_N, b_N = np.asarray(layer.lambda_raw[...], np.float64)
    lambda_N = -np.exp(a_N) + 1j * np.exp(b_N)
    c_HN = np.asarray(layer.C[...], np.float64)[0] + 1j * np.asarray(layer.C[...], np.float64)[1]
    powers_NT = np.exp(lambda_N[:, None] * np.arange(length))
    kernel_HT = (c_HN * (np.exp(lambda_N) - 1) / lambda_N @ powers_NT).real
    y_TH = np.asarray(layer.D[...]) * v_TH
    for t in range(length):
        y_TH[t] += sum(kernel_HT[:, t - s] * v_TH[s] for s in range(t + 1))
    wanted_TE = (y_TH @ weight(layer.widen) * gelu(x_TE @ weight(layer.gate))) @ weight(layer.out)

    got_TE = layer(jnp.asarray(x_TE[None], jnp.float32), jnp.zeros((1, length), jnp.int32))[0]
    assert np.linalg.norm(got_TE - wanted_TE) < 1e-5 * np.linalg.norm(wanted_TE)


def test_parameters():
    """The four projections, Lambda, C, D and the norm; all parameters are float32."""
    leaves = jax.tree.leaves(nnx.state(mixer()))
    assert sum(leaf.size for leaf in leaves) == 2 * E * F + E * H + H * F + 2 * N + 2 * H * N + H + 2 * H
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32")}


def test_no_weight_decay_on_modes_skip_and_norm():
    config = configs_gss.get_config("smoke")
    decayed = optimizer.decayed(models.build(config.model).shapes, config.optimizer.no_decay)
    of_mixer = decayed["groups"]["block_0"]["mixer"]
    assert [name for name, value in of_mixer.items() if not any(jax.tree.leaves(value))] == ["D", "lambda_raw", "norm"]


@pytest.mark.parametrize("kind, lifetimes", [("dss", (0.1, 10)), ("s4d", (20, 2000))])
def test_initial_memory(kind, lifetimes):
    """The number of tokens after which a mode has decayed to 1/e, for the middle 90 % of the modes."""
    layer = mixer(init=kind, modes=2048)
    tokens_N = np.exp(-np.asarray(layer.lambda_raw[0]))
    low, high = np.quantile(tokens_N, (0.05, 0.95))
    assert lifetimes[0] < low < high < lifetimes[1]
    assert np.isfinite(layer.lambda_raw[...]).all()


def test_widths_of_zero_are_refused():
    model = config_lib.default_config(("gss",)).model
    model.dim, model.gss.ssm_width = 8, 0.01
    with pytest.raises(UserError, match="ssm_width=0.01: no channel is left of 8"):
        gss.GSS.check(model)


def test_memory_of_32k_tokens():
    """Both passes take memory linear in the length, far less than the complex states [T, H, N] of all tokens."""
    graphdef, state = nnx.split(mixer(ssm_width=0.5))

    def temporary(length):
        loss = lambda state, x_BTE: jnp.sum(nnx.merge(graphdef, state)(x_BTE, jnp.zeros((1, length), jnp.int32)) ** 2)
        row = jax.ShapeDtypeStruct((1, length, E), jnp.float32)
        return jax.jit(jax.grad(loss)).lower(state, row).compile().memory_analysis().temp_size_in_bytes

    whole, quarter = temporary(32_768), temporary(8192)
    assert whole < 4.1 * quarter
    assert whole < 32_768 * 8 * 8 * N / 3
