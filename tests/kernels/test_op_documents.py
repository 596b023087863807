"""Documents packed into one row do not affect a single bit of each other, forward or backward."""

from functools import partial

import jax
import numpy as np
import pytest

from mesanet_kernels import shapes
from tests.helpers import op_cases as cases

FIRST, LAST = 4, 9  # the middle of three documents, inside a chunk and across one
OPTIONS = {
    "mesa": dict(chunk_size=4, max_iters=8),
    "gated_linear_attention": dict(chunk_size=4),
    "gated_linear_attention_vector": dict(chunk_size=4),
    "delta_rule": dict(chunk_size=4),
    "causal_conv1d": {},
    "linear_scan": {},
    "diagonal_ssm": dict(chunk_size=4),
    "mlstm": dict(chunk_size=4),
    "attention": {},
}


def per_token(op, outputs):
    """Returns the outputs that have a time axis."""
    return outputs[0] if op in cases.RECURRENT else outputs


@pytest.mark.parametrize("op", OPTIONS)
def test_a_perturbed_document_changes_no_other(op):
    inputs = shapes.example(op, shapes.SHAPES[op]["tiny"] | {"B": 1})
    time = np.arange(shapes.SHAPES[op]["tiny"]["T"])
    segment_ids = ((time >= FIRST).astype(np.int32) + (time >= LAST))[None]
    inside = (time >= FIRST) & (time < LAST)
    by_time = [name for name, x in inputs.items() if x.ndim > 1 and x.shape[1] == len(time)]
    other = shapes.example(op, shapes.SHAPES[op]["tiny"] | {"B": 1}, seed=9)
    changed = inputs | {
        name: np.where(inside.reshape((-1,) + (1,) * (inputs[name].ndim - 2)), 3 * other[name], inputs[name])
        for name in by_time
    }

    run = cases.evaluator(partial(cases.OVER_DOCUMENTS[op], segment_ids=segment_ids, **OPTIONS[op]))
    (outputs, gradients), (new_outputs, new_gradients) = run(inputs), run(changed)
    o, new_o = per_token(op, outputs), per_token(op, new_outputs)
    np.testing.assert_array_equal(o[:, ~inside], new_o[:, ~inside])
    assert not np.array_equal(o[:, inside], new_o[:, inside])
    for name in by_time:
        np.testing.assert_array_equal(gradients[0][name][:, ~inside], new_gradients[0][name][:, ~inside])
    if op in cases.RECURRENT:  # the final state is the last document's
        jax.tree.map(np.testing.assert_array_equal, outputs[1], new_outputs[1])


@pytest.mark.parametrize("op", OPTIONS)
def test_documents_equal_separate_sequences(op):
    """Outputs and final state are as if each document stood alone; the initial state belongs to the first only."""
    sizes = shapes.SHAPES[op]["tiny"]
    inputs = shapes.example(op, sizes)
    time = np.arange(sizes["T"])
    segment_ids = np.tile((time >= FIRST).astype(np.int32), (sizes["B"], 1))
    state = cases.random_state(op, sizes) if op in cases.RECURRENT else None
    function = jax.jit(partial(cases.OVER_DOCUMENTS[op], **OPTIONS[op]))

    def piece(where, **options):
        cut = {name: x[:, where] if x.ndim > 1 and x.shape[1] == len(time) else x for name, x in inputs.items()}
        return function(cut, **options)

    options = {} if state is None else {"state": state}
    together = function(inputs, segment_ids=segment_ids, **options)
    first, last = piece(slice(0, FIRST), **options), piece(slice(FIRST, None))
    o = np.concatenate([per_token(op, first), per_token(op, last)], axis=1)
    np.testing.assert_allclose(per_token(op, together), o, rtol=2e-5, atol=2e-5)
    if op in cases.RECURRENT:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), together[1], last[1])
