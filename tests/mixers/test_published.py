"""The layers of the families' own papers (`configs/*.py:SIZE-published`): each computes what the paper's code does.

B batch, T time, D model width, H heads, K key size, V value size, C channels of a projection, W conv taps.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import stats

from configs import gated_deltanet, gla, griffin, mamba2, mesanet, xlstm
from mesanet_jax import config as config_lib
from mesanet_jax import models, schema
from mesanet_jax.mixers import MIXERS, gates
from mesanet_jax.recipes import backbone
from mesanet_jax.training import optimizer

CONFIGS = {"gated_deltanet": gated_deltanet, "gla": gla, "mamba2": mamba2, "mlstm": xlstm}  # by mixer
families = pytest.mark.parametrize("family", CONFIGS)


def mixer_of(family, *, dim=24, heads=2, head_dim=8, **options):
    model = config_lib.default_config((family,)).model
    model.dim, model.layers, model.heads, model.head_dim = dim, 2, heads, head_dim
    CONFIGS[family].as_published(model)
    model[family].update(options)
    MIXERS[family].check(model)
    return MIXERS[family](model, rngs=nnx.Rngs(params=0))


# ---- the layers in NumPy and float64, for one row, as the published code has them, without any code of the mixers


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log1p(np.exp(x))


def rms_norm(x, layer, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * layer["scale"]


def linear(x_TD, layer):
    return x_TD @ layer["kernel"] + layer.get("bias", 0.0)


def convolved(x_TC, taps_WC):
    padded = np.concatenate([np.zeros((len(taps_WC) - 1, x_TC.shape[1])), x_TC])
    return silu(sum(tap_C * padded[i : i + len(x_TC)] for i, tap_C in enumerate(taps_WC)))


def recur(update, q_THK, v_THV, *per_token):
    """o_t = G_t q_t for each head; G_t [V, K] = update(G_{t-1}, ...) gets the t-th element of each `per_token`."""
    o_THV = np.zeros_like(v_THV)
    for head in range(v_THV.shape[1]):
        G = np.zeros((v_THV.shape[2], q_THK.shape[2]))
        for t in range(len(v_THV)):
            G = update(G, v_THV[t, head], *(x[t, head] for x in per_token))
            o_THV[t, head] = G @ q_THK[t, head]
    return o_THV


def gated_deltanet_layer(x_TD, w, heads):
    split = lambda x_TC: x_TC.reshape(len(x_TD), heads, -1)
    unit = lambda x: x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6)
    q_THK = unit(split(convolved(linear(x_TD, w["query"]), w["conv_q"])))
    k_THK = unit(split(convolved(linear(x_TD, w["key"]), w["conv_k"])))
    v_THV = split(convolved(linear(x_TD, w["value"]), w["conv_v"]))
    gamma_TH = np.exp(-np.exp(w["decay_gate"]["A_log"]) * softplus(linear(x_TD, w["decay_gate"])))
    beta_TH = sigmoid(linear(x_TD, w["input_gate"]))

    def update(G, v, k, gamma, beta):
        return gamma * G @ (np.eye(k.size) - beta * np.outer(k, k)) + beta * np.outer(v, k)

    o_THV = rms_norm(recur(update, q_THK, v_THV, k_THK, gamma_TH, beta_TH), w["norm"])
    return linear(o_THV.reshape(len(x_TD), -1) * silu(linear(x_TD, w["output_gate"])), w["out"])


def gla_layer(x_TD, w, heads):
    split = lambda x_TC: x_TC.reshape(len(x_TD), heads, -1)
    q_THK, k_THK, v_THV = (split(linear(x_TD, w[name])) for name in ("query", "key", "value"))
    logits_TC = linear(linear(x_TD, w["decay_gate"]["down"]), w["decay_gate"]["up"])
    gamma_THK = split(sigmoid(logits_TC) ** (1 / 16))
    o_THV = recur(lambda G, v, k, gamma: G * gamma + np.outer(v, k), q_THK, v_THV, k_THK, gamma_THK)
    o_THV = rms_norm(o_THV, w["norm"])
    return linear(o_THV.reshape(len(x_TD), -1) * silu(linear(x_TD, w["output_gate"])), w["out"])


def mamba2_layer(x_TD, w, heads):
    shared = lambda x_TK: np.broadcast_to(x_TK[:, None], (len(x_TD), heads, x_TK.shape[1]))
    C_THK = shared(convolved(linear(x_TD, w["query"]), w["conv_q"]))
    B_THK = shared(convolved(linear(x_TD, w["key"]), w["conv_k"]))
    x_THV = convolved(linear(x_TD, w["value"]), w["conv_v"]).reshape(len(x_TD), heads, -1)
    dt_TH = softplus(linear(x_TD, w["decay_gate"]))
    dA_TH = np.exp(-np.exp(w["decay_gate"]["A_log"]) * dt_TH)
    update = lambda G, x, B, dA, dt: dA * G + dt * np.outer(x, B)
    y_THV = recur(update, C_THK, x_THV, B_THK, dA_TH, dt_TH) + w["D"][:, None] * x_THV
    gated_TC = y_THV.reshape(len(x_TD), -1) * silu(linear(x_TD, w["output_gate"]))
    return linear(rms_norm(gated_TC, w["norm"]), w["out"])


def mlstm_layer(x_TD, w, heads):
    """Without a stabiliser: float64 can represent exp of a gate that is capped at 15."""
    split = lambda x_TC: x_TC.reshape(len(x_TD), heads, -1)
    q_THK, k_THK, v_THV = (split(linear(x_TD, w[name])) for name in ("query", "key", "value"))
    q_THK = q_THK / np.sqrt(q_THK.shape[-1])
    capped = lambda name: 15 * np.tanh(linear(x_TD, w[name]) / 15)
    f_TH, i_TH = sigmoid(capped("decay_gate")), np.exp(capped("input_gate"))
    update = lambda G, v, k, f, i: f * G + i * np.outer(v, k)
    ones_TH1 = np.ones((len(x_TD), heads, 1))
    normaliser_TH1 = np.abs(recur(update, q_THK, ones_TH1, k_THK, f_TH, i_TH))
    h_THV = recur(update, q_THK, v_THV, k_THK, f_TH, i_TH) / np.maximum(normaliser_TH1, 1)
    h_TC = rms_norm(h_THV, w["norm"]).reshape(len(x_TD), -1)
    return linear(h_TC * sigmoid(linear(x_TD, w["output_gate"])), w["out"])


LAYERS = {
    "gated_deltanet": gated_deltanet_layer,
    "gla": gla_layer,
    "mamba2": mamba2_layer,
    "mlstm": mlstm_layer,
}


@families
def test_layer_is_the_published_one(family):
    """The parameters are moved away from zero and one, or a layer that ignores one of them could pass."""
    mixer = mixer_of(family)
    graphdef, params = nnx.split(mixer)
    params = jax.tree.map(lambda leaf: leaf + 0.3 * jax.random.normal(jax.random.key(leaf.size), leaf.shape), params)
    x_BTD = jax.random.normal(jax.random.key(1), (1, 21, 24))
    y_BTD = jax.jit(lambda params, x: nnx.merge(graphdef, params)(x, jnp.zeros((1, 21), jnp.int32)))(params, x_BTD)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), nnx.to_pure_dict(params))
    wanted_TD = LAYERS[family](np.asarray(x_BTD[0], np.float64), weights, mixer.heads)
    assert np.linalg.norm(y_BTD[0] - wanted_TD) < 1e-5 * np.linalg.norm(wanted_TD)


# ---- the parts that the presets use


def test_shared_keys_are_keys_repeated():
    """A layer whose heads share queries and keys equals one whose heads have equal queries and keys."""
    one, many = mixer_of("mamba2"), mixer_of("mamba2", key_heads=None)
    params, wider = (nnx.to_pure_dict(nnx.state(mixer)) for mixer in (one, many))
    tiled = jax.tree.map(
        lambda leaf, wide: jnp.tile(leaf, [w // n for n, w in zip(leaf.shape, wide.shape)]), params, wider
    )
    x_BTD = jax.random.normal(jax.random.key(1), (1, 21, 24))
    call = jax.jit(lambda mixer, x_BTD: mixer(x_BTD, jnp.zeros((1, 21), jnp.int32)))
    of = lambda mixer, params: nnx.merge(nnx.graphdef(mixer), params)
    np.testing.assert_allclose(call(of(one, params), x_BTD), call(of(many, tiled), x_BTD), rtol=1e-5, atol=1e-6)


def softplus_decay(**options):
    section = config_lib.default_config(("mamba2",)).model.mamba2
    section.update(options)
    return gates.SoftplusDecay(4, 4000, 8, options=section, rngs=nnx.Rngs(params=0))


def test_initial_rates_and_steps():
    """A is uniform in 1 to 16; softplus of the bias is log-uniform in 0.001 to 0.1 (mamba_ssm/modules/mamba2.py)."""
    gate = softplus_decay()
    step_H = softplus(np.asarray(gate.bias[...], np.float64))
    assert stats.kstest(np.exp(np.asarray(gate.A_log[...])), "uniform", (1, 15)).pvalue > 0.01
    assert stats.kstest(np.log(step_H), "uniform", (np.log(1e-3), np.log(100))).pvalue > 0.01


def test_a_rate_of_zero_has_a_logarithm():
    assert np.isfinite(softplus_decay(decay_rate_init=(0.0, 1e-3)).A_log[...]).all()


def test_no_weight_decay_on_rates_steps_and_skip():
    config = mamba2.get_config("smoke-published")
    decayed = optimizer.decayed(models.build(config.model).shapes, config.optimizer.no_decay)
    mixer = decayed["groups"]["block_0"]["mixer"]
    assert not any((mixer["decay_gate"]["A_log"], mixer["decay_gate"]["bias"], mixer["D"], mixer["norm"]["scale"]))
    assert all((mixer["decay_gate"]["kernel"], mixer["query"]["kernel"], mixer["conv_q"]))


# (mixer, options of both layers, the option in which they differ)
MATTERS = [
    ("mesa", {}, {"decay_cap": 0.5}),
    ("mesa", {}, {"decay_bias_init": 3.0}),
    ("mesa", {}, {"decay_bias_init_last": 3.0}),
    ("mesa", {}, {"conv_on_value": True}),
    ("mesa", {}, {"output_gate": True}),
    ("mesa", {}, {"lambda_init": 2.0}),
    ("mesa", {}, {"decay": "softplus"}),
    ("mesa", {}, {"value_size": 12}),
    ("gla", {}, {"conv_width": None}),
    ("gla", {}, {"normalize_keys": False, "output_norm": "all"}),
    ("gla", {}, {"input_gate": False}),
    ("gla", {}, {"decay": "low_rank"}),
    ("gla", {"decay": "low_rank"}, {"decay_rank": 2}),
    ("gla", {"decay": "low_rank"}, {"decay_temperature": 1.0}),
    ("gla", {"output_gate": True}, {"output_gate_form": "sigmoid"}),
    ("gla", {"output_gate": True}, {"output_gate_form": "silu_before_norm"}),
    ("gla", {}, {"output_norm": "all"}),
    ("gla", {}, {"heads": 4}),
    ("deltanet", {}, {"key_heads": 1}),
    ("deltanet", {}, {"key_size": 12}),
    ("mamba2", {"decay": "softplus"}, {"decay_rate_init": (1.0, 2.0)}),
    ("mamba2", {"decay": "softplus"}, {"decay_step_init": (0.1, 0.2)}),
    ("mamba2", {}, {"skip": True}),
    ("mlstm", {}, {"input_bias_init": -10.0}),
    ("mlstm", {"decay_bias_init": 30.0}, {"gate_softcap": 15.0}),
]


@pytest.mark.parametrize(("family", "options", "option"), MATTERS, ids=lambda value: str(value).strip("{}"))
def test_every_option_matters(family, options, option):
    """It changes the outputs for the same stream, and they stay finite."""

    def output(options):
        model = config_lib.default_config((family,)).model
        model.dim, model.layers, model.heads, model.head_dim = 24, 2, 2, 8
        model[family].update(options)
        mixer = MIXERS[family](model, rngs=nnx.Rngs(params=0))
        x_BTD = jax.random.normal(jax.random.key(1), (1, 9, 24))
        return mixer.extend(x_BTD, mixer.init_state(1, max_length=9, dtype=jnp.float32))[0]

    before, after = output(options), output(options | option)
    assert jnp.isfinite(after).all()
    assert jnp.linalg.norm(before - after) > 1e-3 * jnp.linalg.norm(before)


def test_lambda_has_a_floor():
    model = config_lib.default_config(("mesa",)).model
    model.mesa.lambda_floor = 0.5
    mixer = MIXERS["mesa"](model, rngs=nnx.Rngs(params=0))
    np.testing.assert_allclose(mixer._lambda(), model.mesa.lambda_init, rtol=1e-6)
    mixer.lambda_raw.set_value(jnp.full_like(mixer.lambda_raw[...], -100.0))
    np.testing.assert_allclose(mixer._lambda(), 0.5)


# ---- the presets


PRESETS = {f"{module.__name__.split('.')[-1]}-published": (module, "-published") for module in CONFIGS.values()}
PRESETS["griffin"] = griffin, ""
presets = pytest.mark.parametrize("preset", PRESETS)


@presets
def test_as_many_parameters_as_mesanet(preset):
    """At the demo size; tests/scripts/test_parameter_table.py has the paper's sizes."""
    module, suffix = PRESETS[preset]
    count = models.build(module.get_config("demo" + suffix).model).parameter_count()
    assert count == pytest.approx(models.build(mesanet.get_config("demo").model).parameter_count(), rel=0.02)


@pytest.mark.parametrize("size", backbone.PAPER)
@presets
def test_presets_share_the_backbone(preset, size):
    """They differ only in the mixer's options, and in the width of the feed-forward network that compensates for it."""
    module, suffix = PRESETS[preset]
    config = module.get_config(size + suffix)
    config_lib.validate(config)
    assert config.name == f"{preset.removesuffix('-published')}-{size}{suffix}"
    ours, mesa = schema.flatten(config), schema.flatten(mesanet.get_config(size))
    differing = {path for path in ours.keys() | mesa.keys() if ours.get(path) != mesa.get(path)}
    mixers = {path for path in differing if path.startswith("model.") and path.split(".")[1] in MIXERS}
    assert differing - mixers <= {"name", "model.pattern", "model.mlp_ratio", "optimizer.learning_rate"}


@families
def test_flops_are_those_the_compiler_counts(family):
    """For a row of one chunk, since XLA counts the body of a loop once. XLA counts elementwise work too."""
    length, dim = 64, 512
    mixer = mixer_of(family, dim=dim, heads=4, head_dim=128)
    x_BTD = jax.ShapeDtypeStruct((1, length, dim), jnp.float32)
    state = jax.eval_shape(lambda: mixer.init_state(1, max_length=length, dtype=jnp.float32))

    def both_passes(mixer, x_BTD, state):
        outputs, pullback = jax.vjp(lambda *inputs: inputs[0].extend(*inputs[1:]), mixer, x_BTD, state)
        return outputs, pullback(outputs)

    def counted(run):
        return jax.jit(run).lower(mixer, x_BTD, state).compile().cost_analysis()["flops"] / length

    ours = mixer.flops_per_token(length)
    assert ours.forward == pytest.approx(counted(lambda mixer, *inputs: mixer.extend(*inputs)), rel=0.03)
    assert ours.training == pytest.approx(counted(both_passes), rel=0.03)
