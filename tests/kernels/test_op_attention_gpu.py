"""Attention with cuDNN on a GPU: accuracy, with windows and documents (run with `pytest -m gpu`)."""

from functools import partial

import jax.numpy as jnp
import pytest

from mesanet_kernels import shapes
from tests.helpers import op_cases as cases


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("documents", [(), (2, 100, 131)])
@pytest.mark.parametrize("implementation", ["cudnn", None])
def test_against_the_reference(window, documents, implementation):
    sizes = dict(B=2, T=160, H=4, J=2, K=64, V=64)
    inputs = cases.rounded(shapes.example("attention", sizes))
    options = dict(window=window, segment_ids=cases.documents(sizes, *documents) if documents else None)
    wanted = cases.evaluate(partial(cases.attention, implementation="reference", **options), inputs, dtype=jnp.float64)
    got = cases.evaluate(partial(cases.attention, implementation=implementation, **options), inputs, dtype=jnp.bfloat16)
    cases.assert_close(got, wanted, limit=5e-3)
