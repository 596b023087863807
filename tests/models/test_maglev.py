"""Maglev (arXiv 2608.02870) by its equations: the shift, both modes, documents, the first update, and each field.

Run `python -m tests.models.test_maglev` in the repository's root to rewrite the golden metrics.

B batch, T time, D model width, L layers.
"""

import functools
import json
import pathlib
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import lrt, maglev
from mesanet_jax import config as config_lib
from mesanet_jax import mesh as mesh_lib
from mesanet_jax import models
from mesanet_jax.errors import UserError
from mesanet_jax.inference.sampler import Sampler
from mesanet_jax.training import step as step_lib
from tests.helpers.memory_models import DOCUMENTS, B, T, batch_of, build, noisy, small_config
from tests.helpers.smoke import ragged_batch

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "memory_steps.json"


@functools.cache
def built(size="smoke", **values):
    """(config, model, parameters, probe, scores); `probe(params, batch, m')` returns the values of one lifted pass."""
    config, model, params = build(maglev, size, **values)

    def probe(params, batch, memory_BTD):
        bound = model.bind(params)
        x0_BTD, context = bound.rows(batch["inputs"], batch["segment_ids"])
        target_BTD, hidden_BTD, _ = bound.two_passes(batch)
        total_BT, parts = bound.objective(batch, 0.25)
        given_BTD = bound.run_with_memory(x0_BTD, context, bound.read_memory(memory_BTD, batch["segment_ids"]))
        return {"target": target_BTD, "hidden": hidden_BTD, "total": total_BT, "given": given_BTD, **parts}

    return config, model, params, jax.jit(probe), jax.jit(model.scores)


def memory(seed=0):
    return jax.random.normal(jax.random.key(seed), (B, T, 32))


# ---- the lifted pass


def test_the_shift_is_exactly_one():
    """Position t of P reads m'_{t-1} (Eq. 3): another m' at s changes nothing up to s, and it changes s + 1."""
    config, _, params, probe, _ = built()
    batch = batch_of(config)
    for place in (0, 6, T - 2):
        other_BTD = memory().at[:, place].set(memory(seed=1)[:, place])
        one_BTD, two_BTD = (probe(params, batch, x)["given"] for x in (memory(), other_BTD))
        changed_T = np.any(np.asarray(one_BTD != two_BTD), axis=(0, 2))
        assert not changed_T[: place + 1].any() and changed_T[place + 1]


@pytest.mark.parametrize("size", ["smoke", pytest.param("smoke-separate", marks=pytest.mark.slow)])
def test_the_whole_lifted_pass_is_causal(size):
    """Another token at s changes nothing before s, neither Q's memory nor the consistency term."""
    config, _, params, probe, _ = built(size)
    batch = batch_of(config)
    other = batch | {"inputs": batch["inputs"].copy()}
    other["inputs"][:, 11] = (other["inputs"][:, 11] + 1) % 60
    one, two = (probe(params, x, memory()) for x in (batch, other))
    for name in one:
        changed_T = np.any(np.asarray(one[name] != two[name]).reshape(B, T, -1), axis=(0, 2))
        assert not changed_T[:11].any() and changed_T[11], name


def test_the_objective_is_its_equation():
    """Eq. 4 and 5."""
    config, _, params, probe, _ = built()
    batch = ragged_batch(config)
    seen = probe(params, batch, memory())
    difference_BTD = np.asarray(seen["hidden"] - seen["target"], np.float64)
    consistency_BT = np.linalg.norm(difference_BTD, axis=-1) / np.sqrt(32)
    np.testing.assert_allclose(seen["consistency"], 0.25 * consistency_BT, rtol=1e-5, atol=1e-6)
    assert 0 < consistency_BT.max() <= 2  # both have length sqrt(D)
    np.testing.assert_allclose(seen["total"], seen["cross_entropy"] + 0.1 * seen["consistency"], rtol=1e-6)
    head_VD = np.asarray(params["head"], np.float64)[:60]
    logits_BTV = 15 * np.tanh(np.asarray(seen["hidden"], np.float64) @ head_VD.T / 15)
    log_total_BT = np.log(np.exp(logits_BTV).sum(axis=-1))
    nats_BT = log_total_BT - np.take_along_axis(logits_BTV, batch["targets"][..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(seen["cross_entropy"], nats_BT * batch["weights"], rtol=1e-5, atol=1e-6)


def without_memory(params):
    """Parameters with W_k = W_v = 0 and gates of 1."""

    def blank(path, leaf):
        return 0 * leaf if "injection" in jax.tree_util.keystr(path) else leaf

    return jax.tree_util.tree_map_with_path(blank, params)


def without_injection(group):
    """The parameters of a group of blocks, without the modules that read the memory."""
    return {
        block: parts | {"attention": {name: x for name, x in parts["attention"].items() if name != "injection"}}
        for block, parts in group.items()
    }


def test_without_injection_the_decoder_is_the_sliding_window_baseline():
    config, model, params, probe, scores = built()
    _, sliding, _ = build(maglev, "smoke-sliding", layers=3)
    params = without_memory(params)
    baseline = {name: params[name] for name in ("embedding", "head", "scales")}
    # Maglev has a group of two blocks, since Q's pattern has two layers, and one block in the tail; the baseline scans
    # over single blocks.
    both, tail = without_injection(params["groups"]), without_injection(params["tail"])
    blocks = [jax.tree.map(lambda leaf: leaf[0], both["block_0"]), jax.tree.map(lambda leaf: leaf[0], both["block_1"])]
    blocks.append(tail["block_0"])
    baseline["groups"] = {"block_0": jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)}
    assert jax.tree.structure(baseline) == jax.tree.structure(sliding.shapes)
    batch = batch_of(config, DOCUMENTS)
    wanted_BT = jax.jit(sliding.loss)(baseline, batch)
    np.testing.assert_allclose(scores(params, batch)[0], wanted_BT, rtol=2e-6)
    np.testing.assert_allclose(probe(params, batch, memory())["cross_entropy"], wanted_BT, rtol=2e-6)


# ---- decoding


def test_parallel_equals_stepwise_given_the_same_memory():
    config, model, params, probe, _ = built()
    batch = batch_of(config)
    wanted_BTD = probe(params, batch, memory())["given"]

    @jax.jit
    def stepwise(params, tokens_BT, read_BTD):
        bound = model.bind(params)

        def one(state, given):
            token_B, read_BD = given
            hidden_B1D, state = bound.advance(token_B[:, None], state._replace(memory_BD=read_BD))
            return state, hidden_B1D[:, 0]

        state = bound.init_state(B, max_length=T)
        return jnp.moveaxis(jax.lax.scan(one, state, (tokens_BT.T, jnp.moveaxis(read_BTD, 1, 0)))[1], 0, 1)

    read_BTD = jnp.pad(memory()[:, :-1], ((0, 0), (1, 0), (0, 0)))
    np.testing.assert_allclose(stepwise(params, batch["inputs"], read_BTD), wanted_BTD, atol=5e-6)


# What is reset at document starts: attention and memory, neither, or one of them.
READINGS = {
    "reset": {},
    "flow": {"reset_at_documents": False},
    "attention_resets": {"memory_at_documents": "flows"},
    "memory_resets": {"reset_at_documents": False, "memory_at_documents": "zeroed"},
}
SLOW_READINGS = {
    "channel": {"gate": "channel"},
    "raw": {"mix_keys": "raw", "gate_input": "stream", "gate_channels": 8},
    "forget": {"forget_gate": True, "memory_key_gain": True, "memory_gate_bias": -1.0},
    "stream": {"memory_scale_init": 0.1},
    "options": {"smear": True, "backout": True, "value_embeddings": "alternate"},
}


@pytest.mark.parametrize(
    "reading",
    ["reset", *(pytest.param(name, marks=pytest.mark.slow) for name in READINGS | SLOW_READINGS if name != "reset")],
)
def test_sweeps_equal_steps(reading):
    """The deployed loss is the same by parallel sweeps and by decoding steps, over rows with several documents."""
    values = (READINGS | SLOW_READINGS)[reading]
    config, _, params, _, scores = built(**values)
    exact = models.build(small_config(maglev, deployed_by="steps", **values).model)
    batch = batch_of(config, DOCUMENTS)
    swept_BT, others, computation = scores(params, batch)
    stepped_BT, _, nothing = jax.jit(exact.scores)(params, batch)
    np.testing.assert_allclose(swept_BT, stepped_BT, atol=2e-5)
    assert 2 < computation["sweeps"] <= T and nothing == {}
    assert np.abs(others["lifted"] - swept_BT).max() > 1e-2  # the memory is another one


def test_few_sweeps_where_nothing_reads_the_memory():
    """The second sweep finds that nothing changed. `max_sweeps` bounds their number."""
    config, _, params, _, scores = built()
    assert scores(without_memory(params), batch_of(config))[2]["sweeps"] == 2
    _, bounded, _ = build(maglev, max_sweeps=3)
    assert jax.jit(bounded.scores)(params, batch_of(config))[2]["sweeps"] == 3


def test_generation_uses_the_decoder_alone_and_a_bounded_state():
    """Prefill and decoding steps give the deployed loss without Q; W keys and values per layer and one memory stay."""
    config, model, params, _, scores = built()
    batch = batch_of(config)
    broken = params | {"prefiller": jax.tree.map(lambda leaf: leaf * jnp.nan, params["prefiller"])}
    sampler = Sampler(model)
    _, state = sampler.prefill(broken, batch["inputs"][0, :13].tolist(), max_length=10_000, chunk=8)
    step = jax.jit(model.decode_step)
    for time in range(13, T):
        logits_1V, state = step(broken, batch["inputs"][:1, time], state)
    nats = -jax.nn.log_softmax(logits_1V)[0, batch["targets"][0, -1]]
    np.testing.assert_allclose(nats, scores(params, batch)[0][0, -1], atol=2e-5)

    floats = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    window, layers, width = config.model.window, config.model.layers, config.model.heads * config.model.head_dim
    assert sum(leaf.size for leaf in floats) == 2 * layers * window * width + config.model.dim
    integers = sum(leaf.size for leaf in jax.tree.leaves(state)) - sum(leaf.size for leaf in floats)
    assert integers == layers * (window + 1) + 1  # the positions of the keys, and that of the next token


# ---- documents


@pytest.mark.parametrize("reading", ["reset", "flow", pytest.param("attention_resets", marks=pytest.mark.slow)])
def test_the_memory_at_document_starts(reading):
    """Another first document changes nothing in later ones, unless memory or attention crosses the boundary."""
    config, _, params, probe, scores = built(**READINGS[reading])
    batch, other = (batch_of(config, DOCUMENTS, seed=seed) for seed in (0, 1))
    mixed = batch | {"inputs": np.where(DOCUMENTS == 0, other["inputs"], batch["inputs"])}

    def deployed(batch):
        return scores(params, batch)[0]

    def lifted(batch):
        return probe(params, batch, memory())["total"]

    for loss in (deployed, lifted):
        one_BT, two_BT = (np.asarray(loss(x))[DOCUMENTS > 0] for x in (batch, mixed))
        assert (one_BT == two_BT).all() == (reading == "reset")
    start_BT = np.pad(DOCUMENTS[:, 1:] != DOCUMENTS[:, :-1], ((0, 0), (1, 0)))
    model = models.build(config.model)
    read_BTD = model.bind(params).read_memory(memory(), DOCUMENTS)
    wanted_BTD = np.pad(memory()[:, :-1], ((0, 0), (1, 0), (0, 0)))
    if reading == "reset":
        wanted_BTD[start_BT] = 0
    np.testing.assert_array_equal(read_BTD, wanted_BTD)


# ---- the first update, and each field


@pytest.mark.parametrize("size", ["smoke", pytest.param("smoke-separate", marks=pytest.mark.slow)])
def test_gradients_of_a_fresh_model_are_finite(size):
    """In a fresh shared model, m = m' exactly at the first token, where the norm has no derivative."""
    config = small_config(maglev, size)
    model = models.build(config.model)
    params = jax.jit(model.init)(jax.random.key(0))

    @jax.jit
    def call(params, batch):
        def total(params):
            total_BT, parts = model.objective(params, batch)
            return total_BT.sum(), parts

        return jax.value_and_grad(total, has_aux=True)(params)

    (_, parts), grads = call(params, batch_of(config))
    if size == "smoke":
        np.testing.assert_allclose(parts["consistency"][:, 0], np.sqrt(1e-12 / 32), rtol=1e-5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert np.abs(grads["groups"]["block_0"]["attention"]["out"]["kernel"]).max() > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "reached"),
    [
        ({}, True),
        ({"detach_memory": True}, True),
        ({"detach_memory": True, "consistency_weight": 0.0}, False),
        ({"detach_memory": True, "stop_gradient": "target"}, False),
        ({"stop_gradient": "both"}, True),
        ({"detach_memory": True, "prefiller_loss_weight": 0.5}, True),
    ],
    ids=str,
)
def test_what_reaches_the_prefiller(values, reached):
    """Q learns from P's cross-entropy through the memory, from the consistency and from its own loss, as fields say."""
    config = small_config(maglev, "smoke-separate", **values)
    model = models.build(config.model)
    params = noisy(jax.jit(model.init)(jax.random.key(0)))
    total = lambda params, batch: model.objective(params, batch)[0].sum()
    grads = jax.tree.leaves(jax.jit(jax.grad(total))(params, batch_of(config))["prefiller"])
    assert [bool(np.any(leaf)) for leaf in grads] == [reached] * len(grads)


def test_sharing():
    """Shared: Q has its own scalars. Separate: it has its own blocks too, without injection, and maybe an embedding."""

    def shapes(size, **values):
        return models.build(small_config(maglev, size, **values).model).shapes

    shared, separate = shapes("smoke")["prefiller"], shapes("smoke-separate")["prefiller"]
    assert set(shared) == {"scales"} and set(shared["scales"]) == {"residual_scale", "embedding_scale"}
    assert set(separate) == {"scales", "stack"}
    assert "injection" not in separate["stack"]["groups"]["block_0"]["attention"]
    assert "embedding" in shapes("smoke-separate", prefiller_embedding=True)["prefiller"]


def test_parameter_counts():
    """In d20, W_k and W_v have 65.5M parameters, gates per head 0.5M, and gates per channel 65.5M."""

    def count(size, **values):
        return models.build(changed(maglev.get_config(size), **values).model).parameter_count()

    sliding = count("d20-sliding")
    assert count("d20") - sliding - 40 == 65_536_000 + 512_000
    assert count("d20", gate="channel") - sliding - 40 == 65_536_000 + 65_536_000
    assert count("d20-separate") - count("d20") == 12 * 1280**2 * 20


def changed(config, **values):
    config.model.update(values)
    return config


def test_flops_of_both_passes():
    """Forward counts the decoder; training counts three times both passes, about twice a baseline's."""

    def flops(size):
        return models.build(maglev.get_config(size).model).flops_per_token(2048)

    whole, sliding = flops("d20"), flops("d20-sliding")
    assert whole.forward - sliding.forward == pytest.approx(2 * (65_536_000 + 512_000))
    assert whole.training > 3 * (whole.forward + sliding.forward) - 3 * 2 * 32_768 * 1280
    assert 1.9 < whole.training / sliding.training < 2.1
    assert flops("d20-separate") == whole


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prefiller_pattern": ("hawk",)}, "prefiller_pattern: no layer 'hawk'; choose from attention, sliding"),
        ({"prefiller_pattern": ()}, "prefiller_pattern: names no layer"),
        ({"prefiller_embedding": True}, "prefiller_embedding=true: needs config.model.sharing=separate"),
        ({"stop_gradient": "all"}, "stop_gradient=all: choose one of none, target, both"),
    ],
)
def test_impossible_models(values, message):
    with pytest.raises(UserError, match=message):
        config_lib.validate(changed(maglev.get_config("smoke"), **values))


def test_unknown_sizes():
    for module in (maglev, lrt):
        with pytest.raises(ValueError, match="variants, as in d20"):
            module.get_config("d20-nothing")
        with pytest.raises(ValueError, match="no size '140m'"):
            module.get_config("140m")


# ---- training


def two_updates(module, sizes=(1, 1, 1), rows_per_device=16):
    """The metrics of two updates of the smoke config on a mesh, from weights that read the memory."""
    config = module.get_config("smoke")
    config.model.layers, config.data.seq_len, config.train.rows_per_device = 2, 32, rows_per_device
    config.optimizer.warmup_steps = 0
    mesh = mesh_lib.make_mesh((*sizes, *(1,) * (len(mesh_lib.AXES) - 3)), jax.devices()[: np.prod(sizes)])
    records = []
    with mesh_lib.use_mesh(mesh):
        program = step_lib.compile_program(config, models.build(config.model), mesh)
        state = program.init(jax.random.key(0))
        shardings = jax.tree.map(lambda x: x.sharding, state["params"])
        state |= {"params": jax.device_put(noisy(state["params"]), shardings)}
        for seed in range(2):
            state, metrics = program.train(state, mesh_lib.place_batch(ragged_batch(config, seed=seed), mesh))
            records.append({name: float(value) for name, value in metrics.items()})
    return records


FAMILIES = {"maglev": maglev, "lrt": lrt}


@functools.cache
def on_one_device(family):
    return two_updates(FAMILIES[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_training_matches_golden_metrics(family):
    """The first of two updates checks loss and gradient, the second what the optimizer made of them."""
    for step, golden in enumerate(json.loads(GOLDEN.read_text())[family]):
        for name, value in golden.items():
            message = f"{name} of step {step + 1}; if this change is intended, run: python -m tests.models.test_maglev"
            np.testing.assert_allclose(on_one_device(family)[step][name], value, rtol=3e-5, err_msg=message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "sizes", "rows_per_device"), [("maglev", (2, 2, 2), 1), ("maglev", (1, 1, 1), 2), ("lrt", (2, 2, 2), 1)]
)
def test_the_mesh_and_accumulation_change_nothing(family, sizes, rows_per_device):
    """Also for every term of the objective: rows have 1/8 to 8/8 of their tokens, so a mean of means would differ."""
    one, other = on_one_device(family)[0], two_updates(FAMILIES[family], sizes, rows_per_device)[0]
    for name in one.keys() - {"skipped", "learning_rate"}:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-5, err_msg=name)


def test_terms_are_accumulated_like_the_loss():
    """With a stand-in for a model and rows with different shares of valid tokens; one term is a mean over positions."""
    config = small_config(maglev)
    config.data.batch_size = 8
    batch = ragged_batch(config)

    def objective(params, batch, share):
        nats_BT = params["scale"] * batch["targets"] * batch["weights"]
        return 3 * nats_BT, {"nats": nats_BT, "everywhere": batch["targets"] * share}

    params, count, model = {"scale": jnp.float32(2)}, batch["weights"].sum(), SimpleNamespace(objective=objective)
    results = [step_lib._accumulate(params, batch, count, model=model, parts=parts) for parts in (1, 4)]
    mean = (batch["targets"] * batch["weights"]).sum() / batch["weights"].sum()
    for (loss, terms), grads in results:
        np.testing.assert_allclose([loss, terms["nats"], grads["scale"]], [6 * mean, 2 * mean, 3 * mean], rtol=1e-6)
        np.testing.assert_allclose(terms["everywhere"], batch["targets"].mean(), rtol=1e-6)


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({family: on_one_device(family) for family in FAMILIES}, indent=2) + "\n")
