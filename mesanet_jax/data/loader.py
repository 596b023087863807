"""Batches as a pure function of the step: nothing to save, nothing to replay on resume.

b: rows of a process's share of a batch   T: seq_len   L: T + 1

Grain shuffles and prefetches. It imports jax itself, so the processes that prepare data never import this file.
"""

from collections.abc import Iterator, Sequence

import grain
import numpy as np

from mesanet_jax.data import packing
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError

Batch = dict[str, np.ndarray]
_THREADS = 2  # reading releases the interpreter lock only in part; more do not help
_AHEAD = 8  # batches


class Batches:
    """Step s -> batch s, for `steps` steps.

    Rows are shuffled globally and without repetition in an epoch, each epoch in another order, an epoch running on
    into the next within a batch. Batch s depends on the rows, `batch_size`, `seed` and s only; a process reads those
    of its rows that its devices hold.

    Args:
      batch_size: rows of the global batch.
      positions: which rows of each batch to read (`mesh.local_rows`); None: all.

    Raises UserError where the rows are fewer than a batch.
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
        if len(rows) < batch_size:
            raise UserError(
                f"the {rows.split} split has {len(rows)} rows, fewer than a batch of {batch_size}; "
                "use a smaller batch or sequence length, or more data"
            )
        self._rows = rows
        self._batch_size = batch_size
        self._steps = steps
        self._positions = range(batch_size) if positions is None else positions
        # Grain's epoch e under seed s is epoch 0 under seed s + e: hashed, neighbouring seeds have nothing in common.
        hashed = int(np.random.SeedSequence(seed).generate_state(1)[0])
        self._order = grain.MapDataset.range(len(rows)).shuffle(seed=hashed).repeat(None)

    def __len__(self) -> int:
        return self._steps

    def row_indices(self, step: int) -> list[int]:
        """The rows of the process's share of batch `step`, in time independent of `step`."""
        first = step * self._batch_size
        return [int(self._order[first + position]) for position in self._positions]

    def __getitem__(self, step: int) -> Batch:
        """inputs, targets, segment_ids int32 [b, T] and weights float32 [b, T]; see `to_batch`."""
        return to_batch(self._rows.read(self.row_indices(step)))

    def iterate(self, from_step: int = 0) -> Iterator[Batch]:
        """Batches from_step, from_step + 1, ... steps - 1, read ahead by threads."""
        steps = grain.MapDataset.source(self)[from_step:]
        return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=_THREADS, prefetch_buffer_size=_AHEAD)))


def eval_batches(rows: PackedRows, batch_size: int, *, positions: Sequence[int] | None = None) -> Iterator[Batch]:
    """Every row once, in order, in batches of one shape; the last is filled up with rows of weight 0.

    `positions` are the rows of each batch to read, ascending; None: all.
    """
    positions = range(batch_size) if positions is None else positions
    for first in range(0, len(rows), batch_size):
        wanted = [first + position for position in positions if first + position < len(rows)]
        rows_R = np.zeros(len(positions), rows.dtype)
        rows_R[: len(wanted)] = rows.read(wanted) if wanted else rows_R[:0]
        yield to_batch(rows_R)


def to_batch(rows_R: np.ndarray) -> Batch:
    """Model inputs of packed rows [b].

    targets are the inputs shifted by one. weights are 1 where the target is a valid token of its input's own document:
    0 where a document starts (no loss on BOS, as in the MesaNet paper), in padding, and where rows of a task have no
    answer. segment_ids count the document starts within the row, from 0; padding stays in the last segment.
    """
    tokens_BL = rows_R["tokens"].astype(np.int32)
    starts_BL = packing.document_starts(rows_R)
    return {
        "inputs": tokens_BL[:, :-1],
        "targets": tokens_BL[:, 1:],
        "segment_ids": packing.segment_ids(starts_BL)[:, :-1],
        "weights": (packing.valid(rows_R) & ~starts_BL & packing.counted(rows_R))[:, 1:].astype(np.float32),
    }
