"""Training with the fast implementations of the Mesa op gives the losses of the reference, step by step."""

import numpy as np
import pytest

from tests.helpers.smoke import build, fresh, ragged_batch, smoke_config, update

STEPS = 12


def losses(implementation, *, steps=STEPS, **overrides):
    """Returns the losses of a smoke run over four batches in turn, so that it learns much in few steps."""
    config = smoke_config(
        "mesanet",
        {"steps": steps, "model.mesa.implementation": implementation, "data.batch_size": 4, "model.heads": 1}
        | overrides,
    )
    run, found = build(config), []
    state = fresh(run)
    for step in range(steps):
        state, metrics = update(run, state, ragged_batch(config, seed=step % 4))
        found.append(float(metrics["loss"]))
    return np.array(found)


@pytest.mark.slow
def test_chunks_in_float32():
    """Training amplifies the rounding differences of the first steps."""
    curve, wanted = losses("xla"), losses("reference")
    assert wanted[-1] < wanted[0] - 0.5
    np.testing.assert_allclose(curve, wanted, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128])
def test_the_gpu_kernel_in_bfloat16(size):
    """The reference has the same bfloat16 keys and queries, so only rounding differs.

    The learning rate is low enough that training does not amplify it. At the config's own learning rate, training on so
    few batches is barely stable.
    """
    options = {"model.head_dim": size, "model.compute_dtype": "bfloat16", "optimizer.learning_rate": 3e-4}
    curve, wanted = (losses(name, steps=24, **options) for name in ("pallas_gpu", "reference"))
    assert np.mean(wanted[-4:]) < np.mean(wanted[:4]) - 0.25
    np.testing.assert_allclose(curve, wanted, atol=0.03)
