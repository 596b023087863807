"""Reads batches as a pure function of the training step, so that resuming needs only the number of the step.

Shape suffixes: b rows of the part of a batch that a process reads, T tokens that a row trains on (seq_len), L = T + 1.

Grain shuffles and prefetches. It imports jax, so processes that prepare data never import this module.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from mesanet_jax.data import packing
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError

Batch = dict[str, np.ndarray]
_THREADS = 2  # reading holds the interpreter lock part of the time, so more threads do not help
_PREFETCHED_BATCHES = 8


class Batches:
    """Maps a step to its batch, for `steps` steps.

    All rows are shuffled, and each is used once per epoch. Every epoch has another order, and a batch may contain the
    end of one epoch and the beginning of the next. Batch s depends only on the rows, `batch_size`, `seed` and s. Each
    process reads only the rows that its devices hold.
    """

    def __init__(
        self,
        rows: PackedRows,
        batch_size: int,
        *,
        seed: int,
        steps: int,
        positions: Sequence[int] | None = None,
    ):
        """Sets up the order of the rows; reads nothing yet.

        Args:
          batch_size: the number of rows of a batch, over all processes.
          positions: the rows of each batch that this process reads (`mesh.local_rows`); None for all.

        Raises:
          UserError: the split has fewer rows than a batch.
        """
        if len(rows) < batch_size:
            raise UserError(
                f"the {rows.split} split has {len(rows)} rows, fewer than a batch of {batch_size}; "
                "use a smaller batch, a shorter sequence length or more data"
            )
        self._rows = rows
        self._batch_size = batch_size
        self._steps = steps
        self._positions = range(batch_size) if positions is None else positions
        # Grain shuffles epoch e of seed s as it shuffles epoch 0 of seed s + e. Hashing the seed keeps the epochs of
        # neighbouring seeds unrelated.
        hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order: Any = grain.MapDataset.range(len(rows)).shuffle(seed=hashed).repeat(None)

    def __len__(self) -> int:
        return self._steps

    def row_indices(self, step: int) -> list[int]:
        """Returns which rows of the split this process reads for batch `step`, in time independent of `step`."""
        first = step * self._batch_size
        return [int(self._order[first + position]) for position in self._positions]

    def __getitem__(self, step: int) -> Batch:
        """Returns inputs, targets and segment_ids, int32 [b, T], and weights, float32 [b, T]; see `to_batch`."""
        return to_batch(self._rows.read(self.row_indices(step)))

    def iterate(self, from_step: int = 0) -> Iterator[Batch]:
        """Iterates over the batches from_step, from_step + 1, ..., steps - 1; threads read ahead."""
        steps = grain.MapDataset.source(self)[from_step:]  # pyright: ignore[reportArgumentType]
        options = grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_PREFETCHED_BATCHES)
        return iter(steps.to_iter_dataset(options))


def eval_batches(rows: PackedRows, batch_size: int, *, positions: Sequence[int] | None = None) -> Iterator[Batch]:
    """Iterates once over all rows in order, in batches of equal shape; the last is filled up with rows of weight 0.

    Args:
      positions: the rows of each batch to read, ascending; None for all.
    """
    positions = range(batch_size) if positions is None else positions
    for first in range(0, len(rows), batch_size):
        wanted = [first + position for position in positions if first + position < len(rows)]
        rows_R = np.zeros(len(positions), rows.dtype)
        rows_R[: len(wanted)] = rows.read(wanted) if wanted else rows_R[:0]
        yield to_batch(rows_R)


def to_batch(rows_R: np.ndarray) -> Batch:
    """Converts packed rows [b] to the inputs of a model.

    Returns:
      inputs, int32 [b, T].
      targets, int32 [b, T]: the inputs shifted by one token.
      segment_ids, int32 [b, T]: the number of the document within the row, from 0; padding continues the last document.
      weights, float32 [b, T]: 1 where the target counts in the loss. It is 0 where the target starts a document (no
        loss on BOS, as in the MesaNet paper), is padding or, in rows of a task, is not an answer.
    """
    tokens_BL = rows_R["tokens"].astype(np.int32)
    starts_BL = packing.document_starts(rows_R)
    return {
        "inputs": tokens_BL[:, :-1],
        "targets": tokens_BL[:, 1:],
        "segment_ids": packing.segment_ids(starts_BL)[:, :-1],
        "weights": (packing.valid(rows_R) & ~starts_BL & packing.counted(rows_R))[:, 1:].astype(np.float32),
    }
