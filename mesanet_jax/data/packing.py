"""Packs documents into rows: puts them end to end and cuts the result into rows of fixed length.

Shape suffixes: L tokens of a row, seq_len + 1 (the inputs and the targets overlap in all but one), N tokens, R rows.

A document that is longer than a row continues in the next one, so no token is lost, and only the last row of a stream
is padded. A stored row is self-contained: it has its tokens, one bit per token that says whether a document starts
there, and the number of valid tokens. Rows of a task (`mesanet_jax.data.recall`) have a second bit per token that says
whether it is an answer; only answers count as targets.
"""

import numpy as np


def row_dtype(*, seq_len: int, vocab_size: int, answers: bool = False) -> np.dtype:
    """Returns the dtype of a stored row of seq_len + 1 tokens.

    Args:
      answers: whether rows have the bits that mark answers.
    """
    length = seq_len + 1
    token = "<u2" if vocab_size <= 1 << 16 else "<u4"
    bits = ("u1", (-(-length // 8),))
    fields = [("tokens", token, (length,)), ("starts", *bits), ("length", "<u4")]
    return np.dtype(fields + [("answers", *bits)] * answers)


def row_length(dtype: np.dtype) -> int:
    """Returns L, the number of tokens of a row."""
    return dtype["tokens"].shape[0]


class Packer:
    """Cuts a stream of documents into rows as they fill up."""

    def __init__(self, dtype: np.dtype, *, pad_id: int):
        self._dtype = dtype
        self._row_length = row_length(dtype)
        self._pad_id = pad_id
        self._tokens: list[np.ndarray] = []
        self._starts: list[int] = []
        self._pending = 0

    def add(self, tokens_N: np.ndarray, *, starts: bool = True) -> None:
        """Appends a document or, with starts=False, a continuation of the previous one."""
        if starts and len(tokens_N):
            self._starts.append(self._pending)
        self._tokens.append(tokens_N)
        self._pending += len(tokens_N)

    def take(self) -> np.ndarray:
        """Returns the rows that are full, [R] of the row dtype, and keeps the remaining tokens."""
        count = self._pending // self._row_length
        return self._cut(count)

    def flush(self) -> np.ndarray:
        """Returns all remaining tokens as rows, [R] of the row dtype; the last one is padded."""
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
    """Packs bool [R, L] into the bytes that a row stores."""
    return np.packbits(marked_RL, axis=1, bitorder="little")


def document_starts(rows_R: np.ndarray) -> np.ndarray:
    """Returns bool [R, L], true at the first token of each document.

    The first token of a row is one only if its document does not continue from the previous row.
    """
    return _marked(rows_R, "starts")


def segment_ids(starts_RL: np.ndarray) -> np.ndarray:
    """Returns int32 [R, L] that counts the documents of each row from 0."""
    return np.cumsum(starts_RL, axis=1, dtype=np.int32) - starts_RL[:, :1]


def valid(rows_R: np.ndarray) -> np.ndarray:
    """Returns bool [R, L], false at padding."""
    return np.arange(row_length(rows_R.dtype)) < rows_R["length"][:, None]


def counted(rows_R: np.ndarray) -> np.ndarray:
    """Returns bool [R, L], true at the tokens that count as targets: the answers if rows have them, else all tokens."""
    answers = "answers" in (rows_R.dtype.names or ())
    return _marked(rows_R, "answers") if answers else np.ones(rows_R["tokens"].shape, bool)


def _marked(rows_R: np.ndarray, name: str) -> np.ndarray:
    return np.unpackbits(rows_R[name], axis=1, count=row_length(rows_R.dtype), bitorder="little").astype(bool)


def stream(rows_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Joins consecutive rows: returns their tokens [N] without padding, and bool [N], true where documents start."""
    valid_RL = valid(rows_R)
    return rows_R["tokens"][valid_RL], document_starts(rows_R)[valid_RL]


def documents(rows_R: np.ndarray) -> list[np.ndarray]:
    """Returns the token array of each document in consecutive rows; the first may be the end of an earlier one."""
    tokens_N, starts_N = stream(rows_R)
    return [part for part in np.split(tokens_N, np.flatnonzero(starts_N)) if len(part)]
