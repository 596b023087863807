"""The parallel form agrees with prefill and single decoding steps, in outputs and states."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesanet_kernels as mk
from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

PREFILL = 6


def mesa_step(token, state, implementation):
    output = mk.mesa_step(**token, state=state, max_iters=5, implementation=implementation)
    return output.o, output.final_state


def gla_step(token, state, implementation):
    return mk.gated_linear_attention_step(**token, state=state, implementation=implementation)


def delta_step(token, state, implementation):
    return mk.delta_rule_step(**token, state=state, implementation=implementation)


def conv_step(token, state, implementation):
    return mk.causal_conv1d_step(**token, state=state, activation="silu", implementation=implementation)


def linear_scan_step(token, state, implementation):
    return mk.linear_scan_step(**token, state=state, implementation=implementation)


def diagonal_ssm_step(token, state, implementation):
    return mk.diagonal_ssm_step(**token, state=state, implementation=implementation)


def mlstm_step(token, state, implementation):
    return mk.mlstm_step(**token, state=state, implementation=implementation)


# Mesa is far from convergence after five iterations: both forms must do the same iterations, not only converge to the
# same solution.
STEPS = {
    "mesa": (mesa_step, dict(max_iters=5, chunk_size=4)),
    "gated_linear_attention": (gla_step, {}),
    "gated_linear_attention_vector": (gla_step, {}),
    "delta_rule": (delta_step, {}),
    "causal_conv1d": (conv_step, {}),
    "linear_scan": (linear_scan_step, {}),
    "diagonal_ssm": (diagonal_ssm_step, {}),
    "mlstm": (mlstm_step, {}),
}


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("op", STEPS)
def test_recurrent_ops(op, implementation):
    step, options = STEPS[op]
    step = jax.jit(partial(step, implementation=implementation))
    inputs = shapes.example(op, "tiny")
    length = shapes.SHAPES[op]["tiny"]["T"]
    run = jax.jit(partial(cases.RECURRENT[op], implementation=implementation, **options))
    o, final_state = run(inputs)

    def cut(where):
        return {name: x[:, where] if x.ndim > 1 and x.shape[1] == length else x for name, x in inputs.items()}

    prefix, state = run(cut(slice(0, PREFILL)))
    outputs = list(jnp.moveaxis(prefix, 1, 0))
    for t in range(PREFILL, length):
        output, state = step(cut(t), state)
        outputs.append(output)
    np.testing.assert_allclose(jnp.stack(outputs, axis=1), o, rtol=1e-5, atol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), state, final_state)


LONG = dict(B=1, T=32_768, H=2, K=4, V=6, D=6, W=4, N=4)
SLOW_GATES = {"log_decay": lambda x: x / 100, "forget_gate": lambda x: x + 6, "a": lambda x: x**0.01}


@pytest.mark.parametrize("op", STEPS)
def test_32768_steps_do_not_drift(op):
    """With slow decays, the last of 32,768 single steps still agree with the parallel form."""
    step, options = STEPS[op]
    inputs = shapes.example(op, {axis: LONG[axis] for axis in shapes.SHAPES[op]["tiny"]})
    inputs |= {name: slower(inputs[name]) for name, slower in SLOW_GATES.items() if name in inputs}
    if op == "mlstm":  # o is divided by n^T q, which must not nearly cancel
        inputs |= {name: np.abs(inputs[name]) for name in "qk"}
    by_time = {name: x for name, x in inputs.items() if x.ndim > 1 and x.shape[1] == LONG["T"]}
    fixed = {name: x for name, x in inputs.items() if name not in by_time}

    @jax.jit
    def decode(by_time):
        def advance(state, token):
            output, state = step(fixed | token, state, "xla")
            return state, output

        tokens = {name: jnp.moveaxis(x, 1, 0) for name, x in by_time.items()}
        state = jax.tree.map(jnp.zeros_like, cases.random_state(op, LONG))
        state, outputs = jax.lax.scan(advance, state, tokens)
        return jnp.moveaxis(outputs[-256:], 0, 1), state

    iterations = {name: x for name, x in options.items() if name == "max_iters"}
    o, state = jax.jit(partial(cases.RECURRENT[op], **iterations))(inputs)
    found = cases.relative_errors(decode(by_time), (o[:, -256:], state))
    assert max(found.values()) < 2 * cases.LIMITS.get(op, 1e-5), found


# (window, size of the state): full attention, a window that fills the ring buffer, a smaller window, and no window
# where the size of the ring buffer limits what is seen.
@pytest.mark.parametrize("window, size", [(None, 11), (3, 3), (3, 8), (None, 4)])
@pytest.mark.parametrize("prefill", [1, 2, 7])
def test_attention(window, size, prefill):
    inputs = shapes.example("attention", "tiny")
    q, k, v = (jnp.asarray(x) for x in inputs.values())
    (batch, length, heads, head_dim), v_dim = k.shape, v.shape[-1]
    full_window = min(size, window or size)
    wanted = mk.attention(q, k, v, window=full_window, scale=0.7, implementation="reference")

    state = mk.init_attention_state(batch, heads, size, head_dim, v_dim, jnp.float32)
    extend = jax.jit(partial(mk.attention_extend, window=window, scale=0.7))
    step = jax.jit(partial(mk.attention_step, window=window, scale=0.7))
    outputs = []
    for start in (0, prefill):  # two calls with several tokens, then single steps
        o, state = extend(*(x[:, start : start + prefill] for x in (q, k, v)), state)
        outputs.append(o)
    for t in range(2 * prefill, length):
        o, state = step(q[:, t], k[:, t], v[:, t], state)
        outputs.append(o[:, None])
    np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), wanted, atol=2e-6)
    assert int(state.next_position) == length and state.keys.shape[1] == size
