"""Decides how many rows an evaluation batch has."""

from mesanet_jax.schema import Config


def evaluation_rows(config: Config, shards: int) -> int:
    """Returns the number of rows of an evaluation batch.

    A batch has as many rows as a training batch, unless the devices cannot hold so many at once
    (`train.rows_per_device`), rounded up to a multiple of the shards. The scores do not depend on this number.

    Args:
      shards: into how many parts the mesh splits a batch (`mesh.batch_shards`).
    """
    rows = min(config.data.batch_size, config.train.rows_per_device * shards)
    return -(-rows // shards) * shards
