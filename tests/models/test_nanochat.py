"""nanochat's Transformer: sizes, initialisation, the block by its equation, each option, training equals decoding.

B batch, T time, D model width, H heads, K head size.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import maglev, nanochat
from mesanet_jax import config as config_lib
from mesanet_jax import models
from mesanet_jax.errors import UserError
from mesanet_jax.flops import mean_context
from mesanet_jax.layers import rotary
from mesanet_jax.models.nanochat_block import Context, NanochatBlock, attend_rows
from tests.helpers.memory_models import B, T, batch_of, build, noisy, small_config

# d20 has 12 x 1280^2 x 20 + 32768 x 1280 parameters in blocks and head: Maglev's (arXiv 2608.02870) 435M without
# embeddings.
BLOCKS_AND_HEAD = {"d12": 110_100_480, "d20": 435_159_040}


def count(module, size):
    return models.build(module.get_config(size).model).parameter_count()


@pytest.mark.parametrize("size", BLOCKS_AND_HEAD)
def test_parameter_counts(size):
    model = maglev.get_config(size).model
    embedding, scalars = 32_768 * model.dim, 2 * model.layers
    for variant in ("sliding", "interleaved"):
        assert count(maglev, f"{size}-{variant}") == BLOCKS_AND_HEAD[size] + embedding + scalars


def test_nanochat_itself():
    """d20 has 896.5M: ten value embeddings of 32,768 x 1,280 with gates of 12 x 10, smear 24 + 1, backout 1."""
    extra = 10 * (32_768 * 1280 + 12 * 10) + 25 + 1
    assert count(nanochat, "d20") == 435_159_040 + 32_768 * 1280 + 40 + extra
    assert round(count(nanochat, "d20") / 1e5) == 8965


def test_length_of_the_published_run():
    """100 tokens per parameter of blocks and head are exactly 83,000 steps of 524,288 tokens."""
    config = maglev.get_config("d20")
    assert (config.steps, config.data.batch_size * config.data.seq_len) == (83_000, 524_288)
    assert (config.model.dim, config.model.heads, config.model.layers, config.model.window) == (1280, 10, 20, 512)


@pytest.mark.parametrize("size", ["d", "12", "d12x", "140m"])
def test_unknown_sizes(size):
    with pytest.raises(ValueError, match="choose from d12, d20"):
        nanochat.get_config(size)


def test_flops_are_those_of_the_matrices_and_of_attention():
    """Six FLOPs per parameter of blocks and head, and those of attention over what a token sees on average."""
    for variant, windows in (("sliding", [512] * 12), ("interleaved", [512, None] * 6)):
        model = models.build(maglev.get_config(f"d12-{variant}").model)
        scores = sum(3 * 4 * 768 * mean_context(2048, window) for window in windows)
        assert model.flops_per_token(2048).training == pytest.approx(6 * BLOCKS_AND_HEAD["d12"] + scores)
    assert mean_context(2048, None) == 1024.5 and mean_context(8, 2) == (1 + 2 * 7) / 8


def test_initialisation():
    config = small_config(nanochat, dim=256, heads=2, head_dim=128, layers=8)
    params = jax.jit(models.build(config.model).init)(jax.random.key(0))
    assert np.std(params["embedding"]) == pytest.approx(0.8, rel=0.02)
    assert np.std(params["head"]) == pytest.approx(0.001, rel=0.02)
    attention, mlp = (params["groups"]["block_1"][name] for name in ("attention", "mlp"))
    bound = np.sqrt(3 / 256)
    for x, limit in (
        (attention["query"]["kernel"], bound), (attention["value"]["kernel"], bound),
        (mlp["up"]["kernel"], 0.4 * bound), (attention["values"]["value_embedding"], bound),
    ):  # fmt: skip
        assert np.abs(x).max() <= limit * (1 + 1e-6) and np.std(x) == pytest.approx(limit / np.sqrt(3), rel=0.05)
    assert not attention["out"]["kernel"].any() and not mlp["down"]["kernel"].any()
    gate = attention["values"]["gate"]["kernel"]
    assert gate.min() >= 0 and gate.max() < 0.02 and "values" not in params["groups"]["block_0"]["attention"]
    np.testing.assert_allclose(params["scales"]["residual_scale"], np.linspace(1.15, 1.05, 8), rtol=1e-6)
    np.testing.assert_allclose(params["scales"]["embedding_scale"], np.linspace(0.20, 0.05, 8), rtol=1e-6)
    assert params["smear"]["amount"] == 0 and params["backout"] == pytest.approx(0.2)


def test_the_block_is_its_equation():
    config = small_config(nanochat)
    model = config.model
    block = NanochatBlock(model, value_embedding=True, memory=False, rngs=nnx.Rngs(params=0))
    graphdef, params = nnx.split(block)
    block = nnx.merge(graphdef, noisy(params))
    x_BTD = jax.random.normal(jax.random.key(2), (B, T, model.dim))
    tokens_BT = batch_of(config)["inputs"]
    context = Context(tokens_BT, jnp.arange(T), attend_rows(None))
    y_BTD, _ = jax.jit(lambda x_BTD: block(x_BTD, context, None, 5))(x_BTD)

    norm = lambda x: x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    a, part = norm(x_BTD), block.attention
    heads = lambda linear: (a @ linear.kernel[...]).reshape(B, T, 2, 16)
    q, k = (1.2 * norm(rotary(heads(linear), jnp.arange(T), base=1e5)) for linear in (part.query, part.key))
    gate = 3 * jax.nn.sigmoid(a[..., :12] @ part.values.gate.kernel[...])[..., None]
    v = heads(part.value) + gate * part.values.value_embedding[...][tokens_BT].reshape(B, T, 2, 16)
    age_TS = np.arange(T)[:, None] - np.arange(T)
    scores = jnp.einsum("bthk,bshk->bhts", q, k) / 4
    weights = jax.nn.softmax(jnp.where((age_TS >= 0) & (age_TS < 5), scores, -jnp.inf))
    mixed = jnp.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, 32)
    wanted = x_BTD + mixed @ part.out.kernel[...]
    wanted += jnp.maximum(norm(wanted) @ block.mlp.up.kernel[...], 0) ** 2 @ block.mlp.down.kernel[...]
    np.testing.assert_allclose(y_BTD, wanted, atol=2e-5)


@functools.cache
def compiled(**values):
    """(config, model, parameters, jitted loss) of nanochat itself, with every option, a tail and a full layer."""
    config, model, params = build(nanochat, **values)
    return config, model, params, jax.jit(model.loss)


def test_training_equals_prefill_and_steps():
    config, model, params, loss = compiled()
    batch = batch_of(config)

    @jax.jit
    def decode(params, tokens_BT):
        logits_BTV, state = model.extend(params, tokens_BT[:, :9], model.init_state(params, B, max_length=T))

        def step(state, tokens_B):
            return model.decode_step(params, tokens_B, state)[::-1]

        _, rest_TBV = jax.lax.scan(step, state, tokens_BT[:, 9:].T)
        return jnp.concatenate([logits_BTV, jnp.moveaxis(rest_TBV, 0, 1)], axis=1)

    scores_BTV = jax.nn.log_softmax(decode(params, batch["inputs"]))
    wanted_BT = -jnp.take_along_axis(scores_BTV, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(loss(params, batch), wanted_BT, rtol=1e-5)


def test_each_option_changes_the_loss():
    """Changing the parameters of an option changes the loss, so the option takes part."""
    config, _, params, loss = compiled()
    batch = batch_of(config)
    before_BT = loss(params, batch)
    middle = params["scales"]["residual_scale"].at[2].add(0.5)
    for changed in (
        {"backout": 0 * params["backout"]},
        {"smear": params["smear"] | {"amount": 1 + params["smear"]["amount"]}},
        {"scales": params["scales"] | {"residual_scale": middle}},
        {"scales": params["scales"] | {"embedding_scale": 0 * params["scales"]["embedding_scale"]}},
    ):
        assert np.abs(loss(params | changed, batch) - before_BT).max() > 1e-2, changed.keys()


@pytest.mark.parametrize("resets", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_documents_read_each_other_only_without_resets(resets):
    """This includes smear: the first token of a document has no neighbour."""
    segments_BT = np.repeat([[0, 1]], [8, 12], axis=1).repeat(B, axis=0).astype(np.int32)
    config, _, params, loss = compiled() if resets else compiled(reset_at_documents=False)
    batch, other = (batch_of(config, segments_BT, seed=seed) for seed in (0, 1))
    mixed = batch | {"inputs": np.where(segments_BT == 0, other["inputs"], batch["inputs"])}
    one_BT, two_BT = (np.asarray(loss(params, x))[segments_BT == 1] for x in (batch, mixed))
    assert (one_BT == two_BT).all() == resets


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kv_heads": 3}, "kv_heads=3: must divide config.model.heads=2"),
        ({"head_dim": 15}, "head_dim=15: rotary positions need an even size"),
        ({"tie_embeddings": True}, "tie_embeddings=True: choose one of False"),
        ({"pattern": ("mesa",)}, "no mixer 'mesa'; choose from attention, sliding"),
    ],
)
def test_impossible_models(values, message):
    config = nanochat.get_config("smoke")
    config.model.update(values)
    with pytest.raises(UserError, match=message):
        config_lib.validate(config)


def test_grouped_heads_have_a_smaller_cache():
    _, model, params = build(nanochat, kv_heads=1)
    caches = jax.eval_shape(lambda params: model.init_state(params, B, max_length=T), params).caches
    keys = [leaf.shape for leaf in jax.tree.leaves(caches) if len(leaf.shape) >= 4]
    assert all(shape[-2:] == (1, 16) for shape in keys) and keys
