"""What every mixer guarantees: all its calls compute one function, documents are kept apart, and states stay small.

B batch, T time, D model width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import gated_deltanet, gla, mamba2, xlstm
from mesanet_jax import config as config_lib
from mesanet_jax.errors import UserError
from mesanet_jax.mixers import MIXERS

B, T, D = 2, 37, 24


def small_model(name):
    model = config_lib.default_config((name,)).model
    model.dim, model.layers, model.heads, model.head_dim = D, 2, 2, 8
    return model


def published(name, config):
    """The options that turn a mixer into the layer of its own paper."""
    model = small_model(name)
    config.as_published(model)
    return model[name].to_dict()


# Every mixer with its defaults, and with options that change what it computes.
VARIANTS = {name: (name, {}) for name in MIXERS} | {
    "mlstm_options": ("mlstm", {"gate_softcap": 15.0, "conv_on_value": True, "decay_bias_init": -1.0, "chunk_size": 8}),
    "gss_options": (
        "gss",
        {"expansion": 1.0, "ssm_width": 0.25, "modes": 16, "init": "s4d", "input_norm": False, "chunk_size": 8},
    ),
    "mlstm_published": ("mlstm", published("mlstm", xlstm)),
    "gla_published": ("gla", published("gla", gla)),
    "mamba2_published": ("mamba2", published("mamba2", mamba2)),
    "gated_deltanet_published": ("gated_deltanet", published("gated_deltanet", gated_deltanet)),
    "mesa_wide_values": ("mesa", {"key_size": 6, "value_size": 10, "key_heads": 1, "decay": "softplus"}),
    "hawk_options": ("hawk", {"num_blocks": 3, "expansion": 1.5, "decay_init": "recurrentgemma"}),
    "sliding": ("sliding", {"window": 5}),
    "attention_cosine": ("attention", {"cosine": True, "kv_heads": 1}),
    "attention_grouped_window": ("attention", {"kv_heads": 1, "window": 5}),
    "mesa_options": ("mesa", {"conv_on_value": True, "output_gate": True, "decay_cap": 1.0}),
    "mesa_unconverged": (  # memories of up to 3,000 tokens, a small lambda, four iterations
        "mesa",
        {"decay_bias_init": 2.0, "decay_bias_init_last": 8.0, "lambda_floor": 0.01, "max_iters": 4, "chunk_size": 8},
    ),
}
variants = pytest.mark.parametrize("variant", VARIANTS)
CONSTANT_STATE = [
    variant for variant, (name, options) in VARIANTS.items() if name != "attention" or "window" in options
]
CHUNKS = (20, 1, 16)
assert sum(CHUNKS) == T


def mixer_of(variant, *, seed=0, norm_eps=1e-3):
    name, options = VARIANTS[variant]
    model = small_model(name)
    model.norm_eps = norm_eps  # keeps the output norm of a document's first tokens well conditioned
    model[name].update(options)
    MIXERS[name].check(model)
    return MIXERS[name](model, rngs=nnx.Rngs(params=seed))


def stream(*, time=T, seed=1, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), (B, time, D)).astype(dtype)


@jax.jit
def whole(mixer, x_BTD, segment_ids_BT):
    return mixer(x_BTD, segment_ids_BT)


@jax.jit
def extend(mixer, x_BTD, state):
    return mixer.extend(x_BTD, state)


@jax.jit
def step(mixer, x_BD, state):
    return mixer.decode_step(x_BD, state)


def steps(mixer, x_BTD, state):
    outputs = []
    for time in range(x_BTD.shape[1]):
        y_BD, state = step(mixer, x_BTD[:, time], state)
        outputs.append(y_BD)
    return jnp.stack(outputs, axis=1), state


def one_document(time=T):
    return jnp.zeros((B, time), jnp.int32)


def relative(y, wanted):
    return float(jnp.linalg.norm(y - wanted) / jnp.linalg.norm(wanted))


@variants
def test_training_is_prefill_and_steps(variant):
    """Whole rows, chunks of odd sizes, a prefill followed by steps, and steps alone give equal outputs and states."""
    mixer, x_BTD = mixer_of(variant), stream()
    wanted_BTD = whole(mixer, x_BTD, one_document())
    empty = mixer.init_state(B, max_length=T, dtype=jnp.float32)

    stepped_BTD, last = steps(mixer, x_BTD, empty)
    first_BTD, state = extend(mixer, x_BTD[:, :20], empty)
    rest_BTD, prefilled_last = steps(mixer, x_BTD[:, 20:], state)
    pieces, state = [], empty
    for chunk_BTD in jnp.split(x_BTD, np.cumsum(CHUNKS)[:-1], axis=1):
        y_BTD, state = extend(mixer, chunk_BTD, state)
        pieces.append(y_BTD)

    for y_BTD in (stepped_BTD, jnp.concatenate([first_BTD, rest_BTD], axis=1), jnp.concatenate(pieces, axis=1)):
        assert relative(y_BTD, wanted_BTD) < 1e-5
    for end in (prefilled_last, state):
        for leaf, wanted in zip(jax.tree.leaves(end), jax.tree.leaves(last), strict=True):
            assert leaf.dtype == wanted.dtype
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(wanted), initial=0)))


DOCUMENTS = np.repeat([0, 1, 2, 3], [9, 1, 17, 10])[None].repeat(B, axis=0).astype(np.int32)


@variants
def test_documents_are_kept_apart(variant):
    """Other inputs in document 2 change nothing outside it, to the bit: neither outputs nor gradients.

    Inside it they change every output, and every gradient unless the mixer is linear: the gradient of a linear map does
    not depend on where it is taken.
    """
    mixer, x_BTD = mixer_of(variant), stream()
    inside_BT = DOCUMENTS == 2
    other_BTD = jnp.where(inside_BT[..., None], stream(seed=2), x_BTD)
    cotangent_BTD = stream(seed=3)

    @jax.jit
    def output_and_gradient(x_BTD):
        y_BTD, pullback = jax.vjp(lambda x: mixer(x, jnp.asarray(DOCUMENTS)), x_BTD)
        return y_BTD, *pullback(cotangent_BTD)

    (y_BTD, gradient_BTD), (other_y_BTD, other_gradient_BTD) = map(output_and_gradient, (x_BTD, other_BTD))
    sum_BTD, _ = output_and_gradient(x_BTD + other_BTD)
    linear = relative(y_BTD + other_y_BTD, sum_BTD) < 1e-5
    for one, other, changes in ((y_BTD, other_y_BTD, True), (gradient_BTD, other_gradient_BTD, not linear)):
        np.testing.assert_array_equal(one[~inside_BT], other[~inside_BT])
        changed_BT = np.any(np.asarray(one != other), axis=-1)
        assert (changed_BT[inside_BT] == changes).all()


@variants
def test_a_document_does_not_know_its_place(variant):
    """A document in the middle of a row has the outputs that it has in a row of its own."""
    mixer, x_BTD = mixer_of(variant), stream()
    row_BTD = whole(mixer, x_BTD, jnp.asarray(DOCUMENTS))
    begin, end = 10, 27
    alone_BTD = whole(mixer, x_BTD[:, begin:end], one_document(end - begin))
    assert relative(row_BTD[:, begin:end], alone_BTD) < 1e-5


@variants
def test_the_past_matters_and_the_future_does_not(variant):
    mixer, x_BTD = mixer_of(variant), stream()
    other_BTD = x_BTD.at[:, 20].add(1.0)
    changed_T = jnp.any(whole(mixer, x_BTD, one_document()) != whole(mixer, other_BTD, one_document()), axis=(0, 2))
    assert not changed_T[:20].any() and changed_T[20:24].all()
    assert changed_T[25:].any() == ("window" not in VARIANTS[variant][1])


@pytest.mark.parametrize("variant", CONSTANT_STATE)
def test_state_does_not_grow(variant):
    mixer = mixer_of(variant)
    empty = lambda length: jax.eval_shape(lambda: mixer.init_state(B, max_length=length, dtype=jnp.float32))
    assert empty(16) == empty(10**6)


@variants
def test_state_keeps_its_shape(variant):
    mixer = mixer_of(variant)
    empty = mixer.init_state(B, max_length=T, dtype=jnp.bfloat16)
    _, state = jax.eval_shape(extend, mixer, stream(dtype=jnp.bfloat16), empty)
    assert jax.eval_shape(lambda: empty) == state


@pytest.mark.parametrize(
    "variant", [name if name in MIXERS else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_bfloat16(variant):
    """Outputs keep the dtype; gradients of parameters are float32 and finite; both are close to those in float32.

    The epsilon of the norm is larger here. A document's first token reads beta (q.k) v, and at a small epsilon the
    rounding of q.k alone changes the gradients through the norm by several per cent.
    """
    mixer = mixer_of(variant, norm_eps=1e-2)
    graphdef, params = nnx.split(mixer)

    @jax.jit
    def outputs_and_gradients(x_BTD):
        y_BTD, pullback = jax.vjp(lambda params: nnx.merge(graphdef, params)(x_BTD, jnp.asarray(DOCUMENTS)), params)
        return y_BTD, *pullback(y_BTD)

    y_BTD, grads = outputs_and_gradients(stream(dtype=jnp.bfloat16))
    wanted_BTD, wanted = outputs_and_gradients(stream(dtype=jnp.bfloat16).astype(jnp.float32))
    assert y_BTD.dtype == jnp.bfloat16
    assert relative(y_BTD.astype(jnp.float32), wanted_BTD) < 0.02
    norm = lambda tree: jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(grads))
    assert norm(jax.tree.map(jnp.subtract, grads, wanted)) < 0.05 * norm(wanted)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("variant", [variant for variant, (name, _) in VARIANTS.items() if name != "attention"])
def test_a_token_repeated_4096_times(variant, dtype):
    """Outputs and gradients stay finite, though Mesa's state is singular but for lambda."""
    mixer = mixer_of(variant)
    x_BTD = jnp.broadcast_to(stream(time=1, dtype=dtype)[:1], (1, 4096, D))

    @jax.jit
    def outputs_and_gradients(x_BTD):
        y_BTD, pullback = jax.vjp(lambda x: mixer(x, jnp.zeros((1, 4096), jnp.int32)), x_BTD)
        return y_BTD, *pullback(y_BTD)

    for x in outputs_and_gradients(x_BTD):
        assert x.dtype == dtype and jnp.isfinite(x).all()


@pytest.mark.parametrize(
    ("mixer", "section", "message"),
    [
        ("attention", {"attention.kv_heads": 2}, "kv_heads=2: must divide config.model.heads=3"),
        ("sliding", {"sliding.kv_heads": 2}, "model.sliding.kv_heads=2: must divide config.model.heads=3"),
        (
            "sliding",
            {"sliding.temperature_init": 100.0},
            "sliding.temperature_init=100.0: must be below temperature_max=100.0",
        ),
        ("attention", {"head_dim": 15}, "head_dim=15: rotary positions need an even size"),
        ("hawk", {"hawk.num_blocks": 7}, "7 blocks do not divide the width 960"),
        ("mesa", {"mesa.lambda_init": 0.25}, "lambda_init=0.25: must be above lambda_floor=0.25"),
        ("mamba2", {"mamba2.key_heads": 2}, "mamba2.key_heads=2: must divide its 3 heads"),
        ("gla", {"gla.heads": 4, "gla.key_heads": 3}, "gla.key_heads=3: must divide its 4 heads"),
        ("gla", {"gla.conv_width": None, "gla.conv_on_value": True}, "gla.conv_on_value: needs a conv_width"),
        ("gla", {"gla.decay_rate_init": (2.0, 1.0)}, "gla.decay_rate_init=.2.0, 1.0.: needs two numbers"),
        ("mesa", {"mesa.decay_step_init": (1e-3,)}, "mesa.decay_step_init=.*: needs two numbers"),
        ("mesa", {"mesa.key_heads": 2}, "mesa.key_heads=2: must divide its 3 heads"),
        ("mesa", {"mesa.decay_cap": 1.5}, "decay_cap=1.5: must be above 0 and at most 1"),
    ],
)
def test_impossible_options(mixer, section, message):
    model = config_lib.default_config((mixer,)).model
    model.heads = 3
    model.update_from_flattened_dict(section)
    with pytest.raises(UserError, match=message):
        MIXERS[mixer].check(model)


@variants
def test_flops_are_positive_and_linear_or_quadratic(variant):
    """A row of twice the length at most doubles the cost per token, and does not change it if the state is constant."""
    one, two = (mixer_of(variant).flops_per_token(length) for length in (512, 1024))
    assert 0 < one.forward < one.training <= 3 * one.forward
    assert two.training < 2 * one.training
    if variant in CONSTANT_STATE:
        assert two.training == pytest.approx(one.training, rel=0.01)
