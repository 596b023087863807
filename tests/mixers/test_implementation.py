"""The `implementation` option of a mixer holds in all of its calls: rows, prefill and decoding.

B batch, T time, D model width.
"""

import functools
import inspect
import pkgutil

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import mesanet_kernels
from mesanet_jax import config as config_lib
from mesanet_jax import mixers
from mesanet_jax.mixers import MIXERS, backends

B, T, D = 2, 9, 24
OPS = {
    function
    for function in vars(mesanet_kernels).values()
    if inspect.isfunction(function) and "implementation" in inspect.signature(function).parameters
}
MAIN_OPS = {
    "attention": "attention",
    "sliding": "attention",
    "deltanet": "delta_rule",
    "gated_deltanet": "delta_rule",
    "gla": "gated_linear_attention",
    "mamba2": "gated_linear_attention",
    "gss": "diagonal_ssm",
    "hawk": "linear_scan",
    "mesa": "mesa",
    "mlstm": "mlstm",
}
CASES = [
    (name, implementation)
    for name, mixer in MIXERS.items()
    if "implementation" in mixer.FIELDS
    for implementation in (None, *mixer.FIELDS["implementation"].choices)
]


def test_every_mixer_of_the_library_has_the_option():
    assert {name for name, _ in CASES} == MAIN_OPS.keys()


@pytest.fixture
def calls(monkeypatch):
    """(op, implementation) of each call of the kernel library that a mixer makes; the call itself chooses by itself."""
    made = []

    def recorded(op):
        @functools.wraps(op)
        def call(*args, implementation="none was passed", **kwargs):
            made.append((op.__name__, implementation))
            return op(*args, **kwargs)

        return call

    def patch(owner, wrap=lambda function: function):
        for name, value in list(vars(owner).items()):
            function = value.__func__ if isinstance(value, staticmethod) else value
            if inspect.isfunction(function) and function in OPS:
                monkeypatch.setattr(owner, name, wrap(recorded(function)))

    for info in pkgutil.iter_modules(mixers.__path__):
        patch(getattr(mixers, info.name))
    for mixer in MIXERS.values():
        patch(mixer, staticmethod)
    return made


@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_every_call_of_an_op_gets_the_implementation(name, implementation, calls):
    model = config_lib.default_config((name,)).model
    model.dim, model.layers, model.heads, model.head_dim = D, 2, 2, 8
    model[name].implementation = implementation
    x_BTD = jax.ShapeDtypeStruct((B, T, D), jnp.float32)

    def run(x_BTD):
        mixer = MIXERS[name](model, rngs=nnx.Rngs(params=0))
        state = mixer.init_state(B, max_length=T, dtype=jnp.float32)
        results = {}
        for way, call in {
            "rows": lambda: mixer(x_BTD, jnp.zeros((B, T), jnp.int32)),
            "prefill": lambda: mixer.extend(x_BTD, state),
            "decoding": lambda: mixer.decode_step(x_BTD[:, 0], state),
        }.items():
            calls.clear()
            call()
            results[way] = tuple(calls)
        made.update(results)

    made = {}
    jax.eval_shape(run, x_BTD)
    main = MAIN_OPS[name]
    assert made.keys() == {"rows", "prefill", "decoding"}
    for way, of_way in made.items():
        assert any(op.startswith(main) for op, _ in of_way), way
        for op, got in of_way:
            cached = op in ("attention_extend", "attention_step")  # cuDNN has none over a cache
            is_main = op in (main, f"{main}_step") and not cached
            assert got == (implementation if is_main else backends.for_other_ops(implementation)), (way, op)


@pytest.mark.parametrize("name", MAIN_OPS)
def test_the_reference_is_the_reference_everywhere(name, calls):
    """No op of any mixer computes otherwise, the convolutions and attention over a cache included."""
    test_every_call_of_an_op_gets_the_implementation(name, "reference", calls)
    assert {implementation for _, implementation in calls} == {"reference"}
