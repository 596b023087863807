"""The rows of an evaluation batch: as many as fit, and a share for every device."""

import pytest

from mesanet_jax import schema
from mesanet_jax.evals.batches import evaluation_rows
from mesanet_jax.schema import Field

SCHEMA = {"data": {"batch_size": Field(1, "")}, "train": {"rows_per_device": Field(1, "")}}


@pytest.mark.parametrize(
    "batch_size, rows_per_device, shards, rows",
    [
        (64, 16, 4, 64),  # the whole batch fits
        (64, 8, 4, 32),  # half of it fits, as in a training that accumulates two parts
        (24, 4, 4, 16),  # what fits does not divide the batch: a training would use three rows per device
        (100, 3, 8, 24),
        (100, 3, 64, 128),  # more devices than rows in some shares: the batch is filled up
        (1, 16, 1, 1),
    ],
)
def test_rows(batch_size, rows_per_device, shards, rows):
    config = schema.build(SCHEMA)
    config.data.batch_size, config.train.rows_per_device = batch_size, rows_per_device
    assert evaluation_rows(config, shards=shards) == rows
