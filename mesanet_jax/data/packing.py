"""Packed rows: documents put end to end and cut into rows of fixed length, with every boundary kept.

L: tokens in a row, seq_len + 1 (inputs and targets overlap in all but one)   N: tokens   R: rows

A document longer than a row goes on in the next one, so no token is lost, and only the last row of a stream is padded.
A stored row is self-contained: its tokens, one bit a token saying "a document starts here", and how many are valid. Rows of
a task (`mesanet_jax.data.recall`) have a second bit, "this token is an answer", and as targets only answers count.
"""

import numpy as np


def row_dtype(*, seq_len: int, vocab_size: int, answers: bool = False) -> np.dtype:
    """The stored form of one row of seq_len + 1 tokens; `answers`: with the bits that mark them."""
    length = seq_len + 1
    token = "<u2" if vocab_size <= 1 << 16 else "<u4"
    bits = ("u1", (-(-length // 8),))
    fields = [("tokens", token, (length,)), ("starts", *bits), ("length", "<u4")]
    return np.dtype(fields + [("answers", *bits)] * answers)


class Packer:
    """Cuts a stream of documents into rows as they fill up."""

    def __init__(self, dtype: np.dtype, *, pad_id: int):
        self._dtype = dtype
        self._row_length = dtype["tokens"].shape[0]
        self._pad_id = pad_id
        self._tokens: list[np.ndarray] = []
        self._starts: list[int] = []
        self._pending = 0

    def add(self, tokens_N: np.ndarray, *, starts: bool = True) -> None:
        """Appends a document, or with starts=False more of the one before."""
        if starts and len(tokens_N):
            self._starts.append(self._pending)
        self._tokens.append(tokens_N)
        self._pending += len(tokens_N)

    def take(self) -> np.ndarray:
        """The rows that are full, [R] of the row dtype; the rest stays."""
        count = self._pending // self._row_length
        return self._cut(count)

    def flush(self) -> np.ndarray:
        """All that is left, the last row padded."""
        return self._cut(-(-self._pending // self._row_length))

    def _cut(self, count: int) -> np.ndarray:
        size = count * self._row_length
        valid = min(size, self._pending)
        tokens_N = np.concatenate(self._tokens) if self._tokens else np.zeros(0, np.int32)
        padded_N = np.full(size, self._pad_id)
        padded_N[:valid] = tokens_N[:valid]
        starts_N = np.zeros(size, bool)
        starts_N[[position for position in self._starts if position < size]] = True
        rows = np.zeros(count, self._dtype)
        rows["tokens"] = padded_N.reshape(count, self._row_length)
        rows["starts"] = bits(starts_N.reshape(count, self._row_length))
        rows["length"] = np.minimum(valid - np.arange(count) * self._row_length, self._row_length)
        self._tokens = [tokens_N[valid:].copy()]
        self._starts = [position - size for position in self._starts if position >= size]
        self._pending -= valid
        return rows


def bits(marked_RL: np.ndarray) -> np.ndarray:
    """bool [R, L] as a row stores it."""
    return np.packbits(marked_RL, axis=1, bitorder="little")


def document_starts(rows_R: np.ndarray) -> np.ndarray:
    """Marks the first token of each document, bool [R, L]. A row that continues a document does not start one."""
    return _marked(rows_R, "starts")


def segment_ids(starts_RL: np.ndarray) -> np.ndarray:
    """Numbers the documents in each row by the marks of their first tokens: int32 [R, L], from 0 in each row."""
    return np.cumsum(starts_RL, axis=1, dtype=np.int32) - starts_RL[:, :1]


def valid(rows_R: np.ndarray) -> np.ndarray:
    """Marks the tokens that are not padding, bool [R, L]."""
    return np.arange(rows_R.dtype["tokens"].shape[0]) < rows_R["length"][:, None]


def counted(rows_R: np.ndarray) -> np.ndarray:
    """Which tokens count as targets, bool [R, L]: the answers where rows have them, else all."""
    answers = "answers" in rows_R.dtype.names
    return _marked(rows_R, "answers") if answers else np.ones(rows_R["tokens"].shape, bool)


def _marked(rows_R: np.ndarray, name: str) -> np.ndarray:
    length = rows_R.dtype["tokens"].shape[0]
    return np.unpackbits(rows_R[name], axis=1, count=length, bitorder="little").astype(bool)


def documents(rows_R: np.ndarray) -> list[np.ndarray]:
    """Splits consecutive rows into the tokens of their documents, without padding.

    If the first row continues a document, the first array is the rest of that document.
    """
    tokens_N, starts_N = stream(rows_R)
    return [part for part in np.split(tokens_N, np.flatnonzero(starts_N)) if len(part)]


def stream(rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens [N] of consecutive rows without padding, and where their documents start, bool [N]."""
    valid_RL = valid(rows_R)
    return rows_R["tokens"][valid_RL], document_starts(rows_R)[valid_RL]
