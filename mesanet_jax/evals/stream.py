"""Scores a split as one contiguous text by overlapping windows, as perplexities of WikiText-103 are measured.

Shape suffixes: N tokens of the text, B windows of a batch, T inputs of a window (the context), L = T + 1.
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
    """Windows of `context` inputs, one every `stride` tokens, that score each token of the text once.

    The first window scores all of its targets, and every other window its last `stride` targets, each of which is
    predicted from at least context - stride + 1 tokens. A smaller stride gives more context, and so a lower
    perplexity, but processes each token context / stride times. If the stride is the context, windows are disjoint.

    Raises:
      UserError: the stride is not between 1 and the context.
    """

    context: int
    stride: int

    def __post_init__(self):
        if not 1 <= self.stride <= self.context:
            raise UserError(f"--stride={self.stride}: must be at least 1 and at most --context={self.context}")

    def count(self, tokens: int) -> int:
        """Returns the number of windows that score a text of `tokens` tokens."""
        return 1 + max(0, -(-(tokens - 1 - self.context) // self.stride))


def read(rows: PackedRows) -> tuple[np.ndarray, np.ndarray]:
    """Reads a whole split into memory: its tokens [N] in order without padding, and bool [N], where documents start.

    Raises:
      UserError: the rows are those of a task, in which only answers are scored.
    """
    if rows.answers:
        raise UserError(
            "--protocol=stream: scores every token, but in these data only answers are scored; use --protocol=rows"
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
    """Iterates over the windows in order, as batches [B, T] like those of `mesanet_jax.data.loader.to_batch`.

    The weight of a target is 1 in the one window that scores it, except where a document starts: nothing is known of
    its first token. The last batch is filled up with windows of weight 0.

    Args:
      positions: the rows of each batch to make; None for all.
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
