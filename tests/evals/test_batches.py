"""The number of rows of an evaluation batch, which `evaluate` and the validation of a training run share."""

import ml_collections
import pytest

from mesanet_jax.evals.batches import evaluation_rows


@pytest.mark.parametrize(
    "batch_size, rows_per_device, shards, rows",
    [
        (16, 16, 1, 16),  # a training batch that the devices hold at once
        (64, 16, 2, 32),  # as many as the devices hold
        (100, 3, 8, 24),
        (14, 4, 2, 8),  # accumulation needs a divisor of the batch, an evaluation does not
        (100, 3, 64, 128),  # more than the batch, because every shard gets the same number of rows
    ],
)
def test_rows_fit_the_devices_and_divide_among_them(batch_size, rows_per_device, shards, rows):
    config = ml_collections.ConfigDict(
        {"data": {"batch_size": batch_size}, "train": {"rows_per_device": rows_per_device}}
    )
    assert evaluation_rows(config, shards) == rows
    assert rows % shards == 0 and rows <= rows_per_device * shards
