"""Gives random access to the packed rows of a prepared directory, local or remote."""

import bisect
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from mesanet_jax.data import manifest, packing
from mesanet_jax.data.files import Directory, first_line, is_local
from mesanet_jax.data.pack_unit import load_tokenizer
from mesanet_jax.data.tokenizer import Tokenizer
from mesanet_jax.errors import UserError

_OPEN_SHARDS = 512  # each memory map holds a file descriptor, and 1024 is a common limit


class PackedRows:
    """The rows of a split, which are read on demand.

    Attributes:
      manifest: the manifest of the directory.
      split: the name of the split.
      fingerprint: changes with the rows of any split, the tokenizer, the row length and the use of BOS and EOS.
      seq_len: the number of tokens that a row trains on; a row holds seq_len + 1 tokens.
      vocab_size: the vocabulary size of the tokenizer.
      answers: whether these are rows of a task, in which only answers count as targets.
      dtype: the dtype of a row (`packing.row_dtype`).
    """

    def __init__(self, path: str, split: str):
        """Reads the manifest and checks that all files are there.

        Args:
          path: a directory written by `mesanet_jax.prepare` or `mesanet_jax.recall`, local or remote.

        Raises:
          UserError: the manifest is missing or broken, the split does not exist, or a shard is missing or incomplete.
        """
        self._directory = Directory(path)
        self.manifest = manifest.read(self._directory)
        if split not in self.manifest["splits"]:
            raise UserError(f"{path}: has no split {split!r}; splits: {', '.join(self.manifest['splits'])}")
        self.split = split
        self.fingerprint: str = self.manifest["fingerprint"]
        self.seq_len: int = self.manifest["seq_len"]
        self.vocab_size: int = self.manifest["vocab_size"]
        self.answers: bool = self.manifest.get("answers", False)  # only rows of a task have them
        self.dtype = packing.row_dtype(seq_len=self.seq_len, vocab_size=self.vocab_size, answers=self.answers)
        self._shards = self.manifest["splits"][split]["shards"]
        self._ends = list(itertools.accumulate(shard["rows"] for shard in self._shards))
        self._check_files()
        self._map = functools.lru_cache(_OPEN_SHARDS)(self._open)

    def _check_files(self) -> None:
        sizes = self._directory.sizes()
        for shard in self._shards:
            where, size = f"{self._directory.path}/{shard['file']}", sizes.get(shard["file"])
            if size != shard["bytes"]:
                found = "missing" if size is None else f"{size} bytes instead of {shard['bytes']}"
                raise UserError(
                    f"{where}: {found}; copy the file again, or delete the directory and prepare the data again"
                )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the rows were made with, loaded from its copy beside them.

        Raises:
          UserError: the copy is missing, broken or not the tokenizer that the rows were made with.
        """
        tokens = load_tokenizer(self._directory, self.manifest["tokenizer"]["kind"])
        if tokens.hash != self.manifest["tokenizer"]["hash"]:
            raise UserError(
                f"{self._directory.path}: its tokenizer file is not the one that its rows were made with; copy it again"
            )
        return tokens

    @property
    def words(self) -> int | None:
        """The number of words of the split's text, by which word-level perplexity divides; None if unknown."""
        return self.manifest["splits"][self.split].get("words")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.void:
        """Returns a row: `tokens` [seq_len + 1], `starts` (packed bits) and `length` (the number of valid tokens)."""
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """Returns the rows at `indices`, [R] of `dtype`.

        Raises:
          IndexError: there is no such row.
          UserError: a remote file cannot be read.
        """
        places = [self._place(int(index)) for index in indices]
        if is_local(self._directory.fs):
            rows_R = np.empty(len(places), self.dtype)
            for position, (shard, row) in enumerate(places):
                rows_R[position] = self._map(shard)[row]
            return rows_R
        return self._read_remote(places)

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the shard of a row, and the row's index within the shard."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index}: the split has {len(self)} rows")
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self._shards[shard]["rows"]

    def _offset(self, shard: int) -> int:
        """Returns the number of bytes of a shard's .npy header."""
        return self._shards[shard]["bytes"] - self._shards[shard]["rows"] * self.dtype.itemsize

    def _open(self, shard: int) -> np.memmap:
        path, rows = self._directory.join(self._shards[shard]["file"]), self._shards[shard]["rows"]
        return np.memmap(path, self.dtype, mode="r", offset=self._offset(shard), shape=(rows,))

    def _read_remote(self, places: list[tuple[int, int]]) -> np.ndarray:
        """Reads a byte range for each row; the filesystem reads several at once."""
        paths = [self._directory.join(self._shards[shard]["file"]) for shard, _ in places]
        begins = [self._offset(shard) + row * self.dtype.itemsize for shard, row in places]
        ends = [begin + self.dtype.itemsize for begin in begins]
        try:
            content = b"".join(self._directory.fs.cat_ranges(paths, begins, ends, on_error="raise"))
        except OSError as error:
            raise UserError(f"{self._directory.path}: cannot be read: {first_line(error)}") from error
        return np.frombuffer(content, self.dtype)

    def decode(self, index: int) -> str:
        """Returns the text of a row, without special tokens.

        A character that the edge of the row cuts becomes U+FFFD.
        """
        row = self[index]
        return self.tokenizer.decode(row["tokens"][: row["length"]])
