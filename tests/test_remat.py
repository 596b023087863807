"""Each rematerialisation policy keeps what it names: a misspelt name would silently be recomputed.

B batch, T time, D model width.
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from mesanet_jax import config as config_lib
from mesanet_jax.models.block import Block
from mesanet_jax.remat import MIXER_OUTPUT, POLICIES, remat
from mesanet_kernels import MESA_SOLUTION

B, T, D = 1, 24, 16
CHUNKS, ITERATIONS = 3, 7
# By mixer: the number of trips of its op's main loop, and how often the policy runs that loop more than "none" does.
LOOPS = {
    # The solve. Its result is the most expensive value of the layer, so only "full" computes it again.
    "mesa": (ITERATIONS, {"matmuls": 0, "mixer": 0, "full": 1}),
    # The scan over chunks. What is read from the memory is needed again for the output norm.
    "gla": (CHUNKS, {"matmuls": 0, "mixer": 1, "full": 1}),
}


def block_loss(mixer):
    """A block as (loss, parameters, input)."""
    model = config_lib.default_config((mixer,)).model
    model.dim, model.layers, model.heads, model.head_dim = D, 2, 2, 8
    model[mixer].implementation, model[mixer].chunk_size = "xla", T // CHUNKS
    if mixer == "mesa":
        model.mesa.max_iters = ITERATIONS
    graphdef, params = nnx.split(Block(model, mixer, rngs=nnx.Rngs(params=0)))

    def loss(policy, params, x_BTD):
        call = lambda params, x_BTD: nnx.merge(graphdef, params)(x_BTD, jnp.zeros((B, T), jnp.int32))
        return jnp.sum(remat(call, policy, scanned=False)(params, x_BTD) ** 2)

    return loss, params, jax.random.normal(jax.random.key(1), (B, T, D))


def loops(jaxpr, trips: int) -> int:
    """The number of loops in a program that run `trips` times and whose results are used."""
    used = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
    count = 0
    for equation in jaxpr.eqns:
        if any(id(x) in used for x in equation.outvars):
            count += equation.primitive.name == "scan" and equation.params["length"] == trips
            inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(equation.params)]
            count += sum(loops(x, trips) for x in inner if hasattr(x, "eqns"))
    return count


@pytest.mark.parametrize("mixer", LOOPS)
def test_a_policy_computes_again_what_it_does_not_keep(mixer):
    loss, params, x_BTD = block_loss(mixer)
    trips, more = LOOPS[mixer]

    def count(policy):
        return loops(jax.make_jaxpr(jax.grad(lambda *args: loss(policy, *args)))(params, x_BTD).jaxpr, trips)

    assert more.keys() == POLICIES.keys() and count("none") > 0
    assert {policy: count(policy) - count("none") for policy in POLICIES} == more


@pytest.mark.parametrize(
    ("policy", "kept"),
    [("matmuls", {MESA_SOLUTION}), ("mixer", {MIXER_OUTPUT, MESA_SOLUTION}), ("full", set())],
)
def test_named_residuals(policy, kept, capsys):
    """By jax's own list of what is kept."""
    loss, params, x_BTD = block_loss("mesa")
    jax.ad_checkpoint.print_saved_residuals(lambda *args: loss(policy, *args), params, x_BTD)
    printed = capsys.readouterr().out
    assert {name for name in (MIXER_OUTPUT, MESA_SOLUTION) if f"named '{name}'" in printed} == kept, printed
