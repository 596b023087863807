"""A wrong call raises an error that says what is wrong, before anything is traced."""

import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

FUNCTIONS = [op for op in cases.ALL if hasattr(mk, op)]  # forms of an op, such as "_vector", raise the same errors


@pytest.mark.parametrize("op", FUNCTIONS)
def test_wrong_shape_names_the_argument(op):
    inputs = shapes.example(op, "tiny")
    name = list(inputs)[1]
    with pytest.raises(ValueError, match=rf"{op}: {name} has shape .*it needs"):
        cases.ALL[op](inputs | {name: inputs[name][..., :-1]})
    with pytest.raises(ValueError, match=rf"{op}: {name} has shape .*dimensions"):
        cases.ALL[op](inputs | {name: inputs[name][None]})


@pytest.mark.parametrize("op", FUNCTIONS)
def test_wrong_dtype_names_the_argument(op):
    inputs = shapes.example(op, "tiny")
    name = next(iter(inputs))
    with pytest.raises(ValueError, match=f"{op}: {name} has dtype int32"):
        cases.ALL[op](inputs | {name: inputs[name].astype(np.int32)})


@pytest.mark.parametrize("op", FUNCTIONS)
def test_unknown_implementation_lists_the_known_ones(op):
    with pytest.raises(NotImplementedError, match="'nope'.*'reference', 'xla'"):
        cases.ALL[op](shapes.example(op, "tiny"), implementation="nope")


@pytest.mark.parametrize("op", [op for op in FUNCTIONS if op in cases.OVER_DOCUMENTS])
def test_segment_ids(op):
    inputs = shapes.example(op, "tiny")
    with pytest.raises(ValueError, match=f"{op}: segment_ids has shape"):
        cases.OVER_DOCUMENTS[op](inputs, segment_ids=np.zeros((2, 3), np.int32))


def test_mesa_solver_and_numbers():
    inputs = shapes.example("mesa", "tiny").values()
    with pytest.raises(NotImplementedError, match="no solver 'chebyshev'"):
        mk.mesa(*inputs, solver="chebyshev")
    with pytest.raises(ValueError, match="max_iters=-1"):
        mk.mesa(*inputs, max_iters=-1)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        mk.mesa(*inputs, chunk_size=0)


def test_vector_decay():
    inputs = shapes.example("gated_linear_attention_vector", "tiny")
    with pytest.raises(ValueError, match=r"log_decay has shape \(2, 11, 2, 7\); it needs .*K=8 as in q"):
        mk.gated_linear_attention(**inputs | {"log_decay": inputs["log_decay"][..., :-1]})


def test_attention_heads_and_window():
    q, k, v = shapes.example("attention", "tiny").values()
    with pytest.raises(ValueError, match="4 heads and k 3"):
        mk.attention(q, np.concatenate([k, k], axis=2)[:, :, :3], np.concatenate([v, v], axis=2)[:, :, :3])
    with pytest.raises(ValueError, match="window is 0"):
        mk.attention(q, k, v, window=0)


def test_gradients_keep_each_dtype():
    inputs = shapes.example("mesa", "tiny")
    q, k, v, *gates = (jnp.asarray(x, jnp.bfloat16 if i < 3 else None) for i, x in enumerate(inputs.values()))
    output = mk.mesa(q, k, v, *gates)
    assert output.o.dtype == jnp.bfloat16 and output.final_state[0].dtype == jnp.float32
