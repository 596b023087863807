"""Data as a run opens them."""

from etils import epath

from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.training.checkpoint import Checkpoints


def check_tokenizer(rows: PackedRows, workdir: epath.Path, *, step: int) -> None:
    """Checks that data were prepared with the tokenizer of a checkpoint's training data.

    Raises:
      UserError: if they were prepared with another one.
    """
    saved = Checkpoints(workdir)
    trained = saved.about(step)["tokenizer"]
    saved.close()
    if rows.tokenizer.hash != trained:
        raise UserError(
            f"config.data.path: its tokenizer ({rows.tokenizer.hash[:12]}) is not the one that {workdir} was trained"
            f" with ({trained[:12]}); prepare these data with that one, by --config.tokenizer.path"
        )
