"""Opens the data of a run, and checks that they are the data that its model was made for."""

from typing import Any

from etils import epath

from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config
from mesanet_jax.training import checkpoint


def open_data(config: Config) -> tuple[PackedRows, PackedRows]:
    """Returns the rows to train on and those to validate on.

    Raises:
      UserError: the data are missing, or were prepared with another vocabulary size or row length than the config's.
    """
    data = config.data
    if not data.path:
        raise UserError("config.data.path: is empty; name a directory written by mesanet_jax.prepare")
    rows = PackedRows(data.path, data.split)
    for field, wanted, given in (
        ("data.seq_len", data.seq_len, rows.seq_len),
        ("model.vocab_size", config.model.vocab_size, rows.vocab_size),
    ):
        if wanted != given:
            remedy = f"set --config.{field}={given} or prepare the data again"
            raise UserError(f"config.{field}={wanted}, but {data.path} was prepared with {given}; {remedy}")
    return rows, PackedRows(data.path, data.validation_split)


def run_metadata(config: Config, rows: PackedRows) -> dict[str, Any]:
    """Returns what a checkpoint records of its run: the config, the data's fingerprint and the tokenizer's hash."""
    return {"config": config.to_dict(), "data": rows.fingerprint, "tokenizer": rows.tokenizer.hash}


def check_tokenizer(rows: PackedRows, directory: epath.Path, *, step: int) -> None:
    """Raises UserError if `rows` were prepared with another tokenizer than the data of the run in `directory`."""
    saved = checkpoint.Checkpoints(directory)
    trained = saved.metadata(step)["tokenizer"]
    saved.close()
    if rows.tokenizer.hash != trained:
        raise UserError(
            f"config.data.path: the tokenizer of these data is {rows.tokenizer.hash[:12]}, but {directory} was trained"
            f" with {trained[:12]}; prepare the data with that tokenizer (--config.tokenizer.path)"
        )
