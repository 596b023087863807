"""How many rows an evaluation scores at once."""

from mesanet_jax.schema import Config


def evaluation_rows(config: Config, *, shards: int) -> int:
    """Returns the number of rows per evaluation batch: as many as the devices hold at once, at most a training batch.

    Args:
      shards: the number of ways in which the mesh splits the rows of a batch (`mesh.batch_shards`). The result is a
        multiple of it; to be so, it may exceed `data.batch_size`, since an evaluation may use other devices than the
        training did.
    """
    wanted = min(config.data.batch_size, config.train.rows_per_device * shards)
    return -(-wanted // shards) * shards
