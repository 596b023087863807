"""A split as one contiguous stream, scored by overlapping windows: how perplexities of WikiText-103 are measured.

N tokens of the stream, W windows, B windows of a batch, T inputs of a window (the context), L = T + 1.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from mesanet_jax.data import packing
from mesanet_jax.data.loader import Batch
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Windows:
    """Windows of `context` inputs that begin every `stride` tokens; each token of the stream is scored once.

    The first window scores all its targets, every other its last `stride`, which so see at least context - stride + 1
    tokens: perplexity falls with the stride, at a cost of context / stride evaluations of each token. A stride of the
    whole context gives disjoint blocks.
    """

    context: int
    stride: int

    def __post_init__(self):
        if not 1 <= self.stride <= self.context:
            raise UserError(f"--stride={self.stride}: must be at least 1 and at most --context={self.context}")

    def count(self, tokens: int) -> int:
        """Windows that a stream of `tokens` takes."""
        return 1 + max(0, -(-(tokens - 1 - self.context) // self.stride))


def read(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """The tokens [N] of a whole split in order, without padding, and where documents start, bool [N]; held in memory.

    Raises:
      UserError: the rows are those of a task, no text.
    """
    if rows.answers:
        raise UserError(
            "--protocol=stream: scores every token, but of these rows only answers count; use --protocol=rows"
        )
    return packing.stream(rows.read(range(len(rows))))


def batches(
    tokens_N: np.ndarray,
    starts_N: np.ndarray,
    windows: Windows,
    *,
    batch_size: int,
    positions: Sequence[int] | None = None,
) -> Iterator[Batch]:
    """Model inputs [B,T] of the windows in order, as `mesanet_jax.data.loader.to_batch` makes them of rows.

    Weights are 1 where a target is scored here: never the start of a document, of which nothing is known, and no target
    twice. The last batch is filled up with windows of weight 0. `positions` are the rows of a batch to make, all unless given.
    """
    position_B = np.arange(batch_size) if positions is None else np.asarray(positions)
    count = windows.count(len(tokens_N))
    filled = -(-count // batch_size) * batch_size
    padding = (0, (filled - 1) * windows.stride + windows.context + 1 - len(tokens_N))
    tokens_N, starts_N = np.pad(tokens_N, padding), np.pad(starts_N, padding, constant_values=True)
    for first in range(0, filled, batch_size):
        begin_B1 = windows.stride * (first + position_B)[:, None]
        place_BL = begin_B1 + np.arange(windows.context + 1)
        starts_BL = starts_N[place_BL]
        unscored_BL = (place_BL > begin_B1 + windows.context - windows.stride) | (begin_B1 == 0)
        yield {
            "inputs": tokens_N[place_BL[:, :-1]].astype(np.int32),
            "targets": tokens_N[place_BL[:, 1:]].astype(np.int32),
            "segment_ids": packing.segment_ids(starts_BL)[:, :-1],
            "weights": (unscored_BL & ~starts_BL)[:, 1:].astype(np.float32),
        }
