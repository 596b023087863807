"""Ops on a mesh that splits the batch in 4 and heads, channels or vocabulary in 2: nothing is gathered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

ROWS = P("data", None, "tensor")
SPECS = {
    "mesa": dict.fromkeys(("q", "k", "v", "log_decay", "beta"), ROWS) | {"lam": P("tensor")},
    "gated_linear_attention": dict.fromkeys(("q", "k", "v", "log_decay", "beta"), ROWS),
    "gated_linear_attention_vector": dict.fromkeys(("q", "k", "v", "log_decay", "beta"), ROWS),
    "delta_rule": dict.fromkeys(("q", "k", "v", "log_decay", "beta"), ROWS),
    "causal_conv1d": {"x": ROWS, "w": P(None, "tensor"), "bias": P("tensor")},
    "mlstm": dict.fromkeys(("q", "k", "v", "input_gate", "forget_gate"), ROWS),
    "linear_scan": dict.fromkeys(("x", "a"), ROWS),
    "diagonal_ssm": dict.fromkeys(("c_re", "c_im", "skip"), P("tensor"))
    | {"u": ROWS, "log_rate": P(), "log_frequency": P()},
    "attention": dict.fromkeys(("q", "k", "v"), ROWS),
    "softmax_cross_entropy": {"hidden": P("data"), "embedding": P("tensor"), "targets": P("data")},
}
SIZES = dict(B=4, T=150, H=4, J=2, K=8, V=16, D=12, W=4, N=8)
OPTIONS = {
    "mesa": dict(chunk_size=32, max_iters=4, tol=1e-3),
    "gated_linear_attention": dict(chunk_size=32),
    "gated_linear_attention_vector": dict(chunk_size=32),
    "delta_rule": dict(chunk_size=32),
    "mlstm": dict(chunk_size=32),
    "diagonal_ssm": dict(chunk_size=16),
}


@pytest.mark.parametrize("op, options", [*((op, {}) for op in SPECS), ("mesa", {"solver": "pcg"})])
def test_forward_and_backward_gather_nothing(op, options):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    inputs = shapes.example(op, {axis: SIZES[axis] for axis in shapes.SHAPES[op]["tiny"]})
    fixed = {name: x for name, x in inputs.items() if not np.issubdtype(x.dtype, np.floating)}
    segments = {} if op == "softmax_cross_entropy" else {"segment_ids": cases.documents(SIZES, 5, 13)}

    def loss(changed):
        outputs = jax.tree.leaves(cases.ALL[op](fixed | changed, **segments, **OPTIONS.get(op, {}), **options))
        return sum(jnp.sum(jnp.sin(3 * x)) for x in outputs)

    changed = {name: x for name, x in inputs.items() if name not in fixed}
    wanted = jax.jit(jax.grad(loss))(changed)
    shardings = {name: NamedSharding(mesh, SPECS[op][name]) for name in changed}
    step = jax.jit(jax.grad(loss), in_shardings=(shardings,), out_shardings=shardings)
    compiled = step.lower(changed).compile()
    moved = set(re.findall(r"\b(all-gather|all-to-all|collective-permute)", compiled.as_text()))
    assert not moved, moved
    errors = cases.relative_errors(step(jax.device_put(changed, shardings)), wanted)
    assert max(errors.values()) < 2e-5, errors


@pytest.mark.parametrize("op", cases.ALL)
def test_memory_is_linear_in_time(op):
    """Twice the tokens take at most 2.2 times the scratch memory of the gradient; quadratic memory would be 4 times."""

    def scratch(length):
        sizes = SIZES | {"B": 1, "T": length, "V": 64}
        inputs = shapes.example(op, {axis: sizes[axis] for axis in shapes.SHAPES[op]["tiny"]})
        floating = {name: x for name, x in inputs.items() if np.issubdtype(x.dtype, np.floating)}
        options = {"block_size": 64} if op == "softmax_cross_entropy" else {}

        def loss(floating):
            return sum(jnp.sum(x) for x in jax.tree.leaves(cases.ALL[op](inputs | floating, **options)))

        return jax.jit(jax.grad(loss)).lower(floating).compile().memory_analysis().temp_size_in_bytes

    assert scratch(2048) < 2.2 * scratch(1024)
