"""PHA: the block by its equation, the effect of every reading and ablation, training without warm-up and clipping.

B batch, T time, D model width, N branches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import pha
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.data.loader import Batches
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.models.parallel_block import BLOCKS
from mesanet_jax.training import optimizer, schedule
from mesanet_jax.training import step as step_lib
from mesanet_jax.training.step import BATCH
from tests.helpers.smoke import ragged_batch, relative_distances
from tests.test_flops import LENGTH, OPTIONS, ROWS, WIDE, masked_products, unrolled  # noqa: F401

B, T, D = 2, 37, 32

# Readings of the paper and ablations: the fields that each changes.
READINGS = {
    "as_it_is": {},
    "aux_branch": {"auxiliary": "branch"},
    "raw": {"mixing": "raw"},
    "swiglu": {"feed_forward": "swiglu"},
    "no_pre_norm": {"pre_norm": False},
    "no_outer_norm": {"outer_norm": False, "alpha": 1.5},
    "dot_product": {"attention.cosine": False},
    "window": {"attention.window": 7},
    **{name: values for name, values in pha.VARIANTS.items() if name != "attention_only"},
}
# These compose the branches in different ways. Norms and factors are the same code for training and decoding.
compositions = pytest.mark.parametrize("reading", ["as_it_is", "aux_branch", "sequential"])


def smoke_model(**values):
    """The `model` section of the smoke config with some values changed."""
    config = pha.get_config("smoke")
    config.model.norm_eps = 1e-3  # keeps the first outputs of a document well conditioned
    config.model.update_from_flattened_dict(values)
    config_lib.MODELS["pha"].check(config.model)
    return config.model


@functools.cache
def block_of(reading):
    """A block with random weights, mixtures and norm scales."""
    model = smoke_model(**READINGS[reading])
    block = BLOCKS[model.composition](model, model.pattern, rngs=nnx.Rngs(params=0))
    graphdef, state = nnx.split(block)
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noisy = [leaf + 0.3 * jax.random.normal(key, leaf.shape) * (leaf.ndim < 2) for leaf, key in zip(leaves, keys)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, noisy))


def stream(seed=0):
    return jax.random.normal(jax.random.key(seed), (B, T, D))


def relative(y, wanted):
    return float(jnp.linalg.norm(y - wanted) / jnp.linalg.norm(wanted))


whole = jax.jit(lambda block, x_BTD, segments_BT: block(x_BTD, segments_BT))
extend = jax.jit(lambda block, x_BTD, state: block.extend(x_BTD, state))
step = jax.jit(lambda block, x_BD, state: block.decode_step(x_BD, state))
ONE_DOCUMENT = jnp.zeros((B, T), jnp.int32)
DOCUMENTS = jnp.asarray(np.repeat([[0, 1, 2]], [11, 15, 11], axis=1).repeat(B, axis=0))


# ---- the block


def test_the_block_is_its_equation():
    """x = RMSNorm(alpha x + sum_i w_i RMSNorm_i(branch_i(RMSNorm(x)))); the feed-forward branch mixes two networks."""
    block, x_BTD = block_of("as_it_is"), stream()
    branch = jax.jit(lambda block, name, h_BTD: getattr(block, name)(h_BTD, ONE_DOCUMENT), static_argnums=1)
    h_BTD = block.pre_norm(x_BTD)
    softplus = lambda p_N: np.log1p(np.exp(np.asarray(p_N, np.float64)))
    weights = lambda mixture: softplus(mixture.mixing[...]) / softplus(mixture.mixing[...]).sum()
    inner_2 = weights(block.ffn.mixture)
    ffn_BTD = inner_2[0] * block.ffn.primary(h_BTD) + inner_2[1] * block.ffn.auxiliary(h_BTD)
    outputs = (
        block.gss_norm(branch(block, "gss", h_BTD)),
        block.attention_norm(branch(block, "attention", h_BTD)),
        block.ffn_norm(ffn_BTD),
    )
    total_BTD = (2 * 2) ** 0.25 * x_BTD + sum(w * z for w, z in zip(weights(block.mixture), outputs, strict=True))
    wanted_BTD = block.outer_norm(total_BTD)
    assert np.ptp(weights(block.mixture)) > 0.01
    assert relative(whole(block, x_BTD, ONE_DOCUMENT), wanted_BTD) < 3e-6


def test_the_sequential_block_is_its_equation():
    block, x_BTD = block_of("sequential"), stream()
    wanted_BTD = x_BTD
    for name in ("gss", "attention", "ffn"):
        pre, branch, outer = (getattr(block, f"{name}_{place}_norm") for place in ("pre", "branch", "outer"))
        z_BTD = branch(getattr(block, name)(pre(wanted_BTD), ONE_DOCUMENT))
        wanted_BTD = outer((2 * 2) ** 0.25 * wanted_BTD + z_BTD)
    assert relative(whole(block, x_BTD, ONE_DOCUMENT), wanted_BTD) < 3e-6


@compositions
def test_training_equals_prefill_and_steps(reading):
    block, x_BTD = block_of(reading), stream()
    wanted_BTD = whole(block, x_BTD, ONE_DOCUMENT)
    state = block.init_state(B, max_length=T, dtype=jnp.float32)
    first_BTD, state = extend(block, x_BTD[:, :20], state)
    outputs = [first_BTD]
    for time in range(20, T):
        y_BD, state = step(block, x_BTD[:, time], state)
        outputs.append(y_BD[:, None])
    assert relative(jnp.concatenate(outputs, axis=1), wanted_BTD) < 1e-5


@compositions
def test_documents_are_kept_apart(reading):
    block, x_BTD = block_of(reading), stream()
    other_BTD = jnp.where((DOCUMENTS == 1)[..., None], stream(seed=1), x_BTD)
    one_BTD, two_BTD = whole(block, x_BTD, DOCUMENTS), whole(block, other_BTD, DOCUMENTS)
    np.testing.assert_array_equal(one_BTD[DOCUMENTS != 1], two_BTD[DOCUMENTS != 1])
    assert (np.asarray(one_BTD != two_BTD)[DOCUMENTS == 1]).any(axis=-1).all()


def test_every_reading_computes_something_else():
    """With the same weights, every option has an effect. (PARTS has those that add or remove parameters.)"""
    outputs = {
        reading: np.asarray(whole(block_of(reading), stream(), ONE_DOCUMENT))
        for reading in READINGS
        if reading == "no_branch_norm" or not any(PARTS.get(reading, ()))
    }
    names = sorted(outputs)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            assert np.abs(outputs[one] - outputs[other]).max() > 1e-3, (one, other)


# ---- the mixture


@pytest.mark.parametrize(("mixing", "weight"), [("normalized", 1 / 3), ("raw", np.log(2)), ("uniform", 1 / 3)])
def test_initial_weights(mixing, weight):
    model = smoke_model(mixing=mixing)
    block = BLOCKS["parallel"](model, model.pattern, rngs=nnx.Rngs(params=0))
    np.testing.assert_allclose(block.mixture.weights(), [weight] * 3, rtol=1e-6)
    np.testing.assert_allclose(
        block.ffn.mixture.weights(), [1.5 * weight if mixing != "raw" else weight] * 2, rtol=1e-6
    )
    assert (block.mixture.mixing is None) == (block.ffn.mixture.mixing is None) == (mixing == "uniform")


def test_weights_are_a_share_of_softplus():
    mixture = block_of("as_it_is").mixture
    for scores, wanted in (([0.0, 50.0, 0.0], 50 / (50 + 2 * np.log(2))), ([-50.0, 0.0, -50.0], 1.0)):
        mixture.mixing[...] = jnp.array(scores)
        weights_N = mixture.weights()
        assert weights_N[1] == pytest.approx(wanted, rel=1e-6) and weights_N.sum() == pytest.approx(1)


def built(size="smoke", **values):
    config = pha.get_config(size)
    config.data.batch_size, config.model.norm_eps = 2, 1e-3
    config.update_from_flattened_dict(values)
    config_lib.validate(config)
    return config, models.build(config.model)


def loss_and_grads(model):
    return jax.value_and_grad(lambda params, batch: jnp.sum(model.loss(params, batch)))


@functools.cache
def reference():
    """(config, model, parameters, loss, gradients) of the smoke model on one device."""
    config, model = built()
    params = jax.jit(model.init)(jax.random.key(0))
    return config, model, params, *jax.device_get(jax.jit(loss_and_grads(model))(params, ragged_batch(config)))


def test_every_layer_learns_its_mixtures():
    _, _, _, _, grads = reference()
    for part in (grads["groups"]["block_0"], grads["groups"]["block_0"]["ffn"]):
        assert (np.abs(part["mixture"]["mixing"]).max(axis=-1) > 1e-3).all()


def test_mixtures_are_layer_statistics():
    config, model, params, _, _ = reference()
    mixing = params["groups"]["block_0"]["mixture"]["mixing"].at[1].set(jnp.array([1.0, 0, -1]))
    block = params["groups"]["block_0"] | {"mixture": {"mixing": mixing}}
    stats = jax.jit(model.layer_stats)(params | {"groups": {"block_0": block}}, ragged_batch(config))
    names = ["mixture/gss", "mixture/attention", "mixture/ffn"]
    assert set(stats) == {*names, "ffn_mixture/primary", "ffn_mixture/auxiliary"}
    weights_LN = np.array([[stats[name][layer] for name in names] for layer in range(2)])
    np.testing.assert_allclose(weights_LN[0], 1 / 3, rtol=1e-6)
    shares = np.log1p(np.exp([1.0, 0, -1]))
    np.testing.assert_allclose(weights_LN[1], shares / shares.sum(), rtol=1e-6)


def test_no_weight_decay_on_mixtures_and_temperatures():
    config, model = built()
    decayed = optimizer.decayed(model.shapes, config.optimizer.no_decay)["groups"]["block_0"]
    assert not any(
        jax.tree.leaves([decayed["mixture"], decayed["ffn"]["mixture"], decayed["attention"]["log_temperature"]])
    )
    assert all(jax.tree.leaves([decayed["ffn"]["primary"], decayed["attention"]["query"], decayed["gss"]["C"]]))


# ---- sizes, ablations, initialisation

COUNTS = {"90m": 87_311_207, "125m": 128_346_154, "180m": 175_977_137}


@pytest.mark.parametrize("size", COUNTS)
def test_parameter_counts(size):
    count = lambda name: models.build(pha.get_config(name).model).parameter_count()
    assert count(size) == COUNTS[size]
    assert count(f"{size}-attention_only") == pytest.approx(COUNTS[size], rel=1e-4)
    assert count(f"{size}-sequential") == pytest.approx(COUNTS[size], rel=3e-4)  # the norms differ


@pytest.mark.parametrize("size", pha.SMALL)
def test_the_small_attention_only_is_matched(size):
    count = lambda name: models.build(pha.get_config(name).model).parameter_count()
    assert count(f"{size}-attention_only") == pytest.approx(count(size), rel=2e-3)


# The parameters of a block that an ablation removes and adds.
PARTS = {
    "no_gss": ({"gss", "gss_norm"}, set()),
    "attention_only": ({"gss", "gss_norm"}, set()),
    "no_attention": ({"attention", "attention_norm"}, set()),
    "uniform": ({"mixture"}, set()),
    "no_branch_norm": ({"gss_norm", "attention_norm", "ffn_norm"}, set()),
    "alpha1": (set(), set()),
    "no_auxiliary": (set(), set()),  # it is inside `ffn`
    "sequential": (
        {"mixture", "pre_norm", "outer_norm", "gss_norm", "attention_norm", "ffn_norm"},
        {f"{name}_{place}_norm" for name in ("gss", "attention", "ffn") for place in ("pre", "branch", "outer")},
    ),
}


def block_shapes(variant=""):
    return models.build(pha.get_config(f"smoke-{variant}" if variant else "smoke").model).shapes["groups"]["block_0"]


@pytest.mark.parametrize("variant", pha.VARIANTS)
def test_an_ablation_is_the_part_that_it_names(variant):
    full, ablated = block_shapes(), block_shapes(variant)
    removed, added = PARTS[variant]
    assert (full.keys() - ablated.keys(), ablated.keys() - full.keys()) == (removed, added)
    for name in (full.keys() & ablated.keys()) - {"mixture", "ffn"}:
        assert full[name] == ablated[name]
    widths = {"no_auxiliary": {"primary"}, "uniform": {"primary", "auxiliary"}}.get(
        variant, {"primary", "auxiliary", "mixture"}
    )
    assert set(ablated["ffn"]) == widths


def test_variants_are_one_line_overrides():
    """`90m-no_gss` is `90m` with --config.model.pattern=attention, and so on."""
    for variant, values in pha.VARIANTS.items():
        overrides = {
            f"model.{name}": ",".join(value) if isinstance(value, tuple) else str(value)
            for name, value in values.items()
        }
        if variant == "attention_only":
            overrides["model.mlp_ratio"] = str(pha.MATCHED_MLP_RATIO["90m"])
        config = config_lib.load("configs/pha.py:90m", overrides | {"name": f"pha-90m-{variant}"})
        assert config.to_dict() == pha.get_config(f"90m-{variant}").to_dict(), variant


@pytest.mark.parametrize("name", ["90m-nothing", "70m", "90m-"])
def test_unknown_sizes(name):
    with pytest.raises(ValueError, match="sizes: 90m, 125m"):
        pha.get_config(name)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pattern": ("gss", "gss")}, "pattern=gss,gss: a block of pha can contain each mixer only once"),
        (
            {"auxiliary_mlp_ratio": 0.001},
            "auxiliary_mlp_ratio=0.001: a feed-forward network of width 0.001 x 32 has no units",
        ),
    ],
)
def test_impossible_models(values, message):
    with pytest.raises(UserError, match=message):
        smoke_model(**values)


def test_the_state_is_constant_but_for_keys_and_values():
    _, model = built()

    def state(length):
        return jax.eval_shape(lambda params: model.init_state(params, 1, max_length=length), model.shapes)[0][0]

    assert state(64)["gss"] == state(4096)["gss"] and state(64)["ffn"] == ()
    assert {leaf.shape for leaf in state(64)["attention"][:2]} == {(2, 1, 64, 2, 16)}


def test_alpha():
    assert block_of("as_it_is").alpha == 4**0.25 and block_of("alpha1").alpha == 1.0


@pytest.mark.parametrize("deepnorm", [True, False])
def test_initialisation(deepnorm):
    """With DeepNet's gain (8 L)^(-1/4) on value, output and feed-forward projections, and with the usual scales."""
    model = smoke_model(dim=128, layers=4, heads=8, deepnorm_init=deepnorm)
    block = BLOCKS["parallel"](model, model.pattern, rngs=nnx.Rngs(params=0))
    inside, outwards = (32**-0.5, 32**-0.5) if deepnorm else (1, 2 / 4)  # variance times fan-in
    for linear, scale in (
        (block.attention.value, inside), (block.attention.out, outwards),
        (block.gss.value, inside), (block.gss.out, outwards),
        (block.ffn.primary.up, inside), (block.ffn.auxiliary.down, outwards),
        (block.attention.query, 1), (block.gss.gate, 1),
    ):  # fmt: skip
        kernel = linear.kernel[...]
        assert jnp.var(kernel) * kernel.shape[0] == pytest.approx(scale, rel=0.1)


# ---- as a whole model


def test_flops_are_those_the_compiler_counts(unrolled):  # noqa: F811
    config = config_lib.default_config(("gss", "attention"), kind="pha").model
    config.update(WIDE | {"auxiliary_mlp_ratio": 0.25})
    config.gss.update(OPTIONS["gss"])
    config.attention.update(OPTIONS["attention"] | {"cosine": True})
    model = models.build(config)
    batch = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), dtype) for name, dtype in BATCH.items()}
    loss = lambda params, batch: jnp.sum(model.loss(params, batch))
    counted = jax.jit(loss).lower(model.shapes, batch).compile().cost_analysis()["flops"] / (ROWS * LENGTH)
    ours = model.flops_per_token(LENGTH) + masked_products(("attention",))
    assert ours.forward == pytest.approx(counted, rel=0.03)
    assert ours.training == pytest.approx(3 * ours.forward)


@pytest.mark.slow
def test_remat_changes_nothing():
    config, _, params, loss, grads = reference()
    again, other = jax.jit(loss_and_grads(built(**{"model.remat": "mixer"})[1]))(params, ragged_batch(config))
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    assert max(relative_distances(other, grads).values()) < 2e-5


@pytest.mark.parametrize("composition", BLOCKS)
def test_bfloat16_activations(composition):
    values = {"model.composition": composition}
    config, wide = built(**values)
    _, narrow = built(**values, **{"model.compute_dtype": "bfloat16"})
    params, batch = jax.jit(wide.init)(jax.random.key(0)), ragged_batch(config)
    nats_BT, wanted_BT = (jax.jit(model.loss)(params, batch) for model in (narrow, wide))
    assert nats_BT.dtype == jnp.float32
    np.testing.assert_allclose(nats_BT.sum(), wanted_BT.sum(), rtol=3e-3)


def test_on_a_mesh():
    """Parameters are split like those of other blocks, and neither loss nor gradients depend on it."""
    config, model, params, loss, grads = reference()
    mesh = mesh_lib.make_mesh((1, 2, 2), jax.devices()[:4])
    with mesh_lib.use_mesh(mesh):
        shardings = mesh_lib.shardings(model.axes, model.shapes, mesh)
        params = jax.device_put(params, shardings)
        kernel = params["groups"]["block_0"]["ffn"]["primary"]["up"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (2, kernel.shape[1] // 2, kernel.shape[2] // 2)
        batch = mesh_lib.place_batch(ragged_batch(config), mesh)
        split_loss, split_grads = jax.device_get(jax.jit(loss_and_grads(model))(params, batch))
    np.testing.assert_allclose(split_loss, loss, rtol=1e-6)
    assert max(relative_distances(split_grads, grads).values()) < 2e-5


def test_trains_without_warm_up_and_clipping(tiny_data):
    """As the abstract claims: at the full learning rate from the first step, the loss never rises far, and it falls."""
    rows = PackedRows(tiny_data, "train")
    config = pha.get_config("smoke")
    config.steps, config.model.vocab_size = 60, rows.vocab_size
    config.optimizer.warmup_steps, config.optimizer.clip_norm = 0, None
    config_lib.validate(config)
    assert schedule.learning_rate(config)(0) == config.optimizer.learning_rate == 5e-3
    mesh = mesh_lib.make_mesh((1, 1, 1), jax.devices()[:1])
    losses = []
    with mesh_lib.use_mesh(mesh):
        program = step_lib.compile_program(config, models.build(config.model), mesh)
        state = program.init(jax.random.key(0))
        for batch in Batches(rows, config.data.batch_size, seed=0, steps=config.steps).iterate():
            state, metrics = program.train(state, mesh_lib.place_batch(batch, mesh))
            losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and max(losses) < losses[0] + 0.1
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
