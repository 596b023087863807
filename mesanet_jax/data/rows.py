"""Random access to the packed rows of a prepared directory, local or remote."""

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

_OPEN_SHARDS = 512  # memory maps each hold a file descriptor, and 1024 is a common limit


class PackedRows:
    """The rows of one split, read as they are asked for.

    Attributes:
      manifest: the directory's manifest.
      fingerprint: changes with the rows of any split, the tokenizer, the row length or the BOS/EOS policy.
      seq_len, vocab_size: as in the manifest; rows hold seq_len + 1 tokens.

    Raises UserError for a missing or broken manifest, an unknown split, and a shard that is missing or cut short.
    """

    def __init__(self, path: str, split: str):
        self._directory = Directory(path)
        self.manifest = manifest.read(self._directory)
        if split not in self.manifest["splits"]:
            raise UserError(f"{path}: has no split {split!r}; splits: {', '.join(self.manifest['splits'])}")
        self.split = split
        self.fingerprint: str = self.manifest["fingerprint"]
        self.seq_len: int = self.manifest["seq_len"]
        self.vocab_size: int = self.manifest["vocab_size"]
        self.answers: bool = self.manifest.get("answers", False)  # of a task: only they count as targets
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
                raise UserError(f"{where}: {found}; copy it again, or delete the directory and rerun prepare")

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer the rows were made with, from its copy beside them."""
        tokens = load_tokenizer(self._directory, self.manifest["tokenizer"]["kind"])
        if tokens.hash != self.manifest["tokenizer"]["hash"]:
            raise UserError(f"{self._directory.path}: its tokenizer file is not the one its rows were made with")
        return tokens

    @property
    def words(self) -> int | None:
        """Words of the split's text, the denominator of word-level perplexity; None in data that were prepared before they
        were counted."""
        return self.manifest["splits"][self.split].get("words")

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> np.void:
        """One row: `tokens` [seq_len + 1], `starts` (packed bits), `length` (valid tokens)."""
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> np.ndarray:
        """The rows at `indices`, [R] of `packing.row_dtype`."""
        places = [self._place(int(index)) for index in indices]
        if is_local(self._directory.fs):
            rows_R = np.empty(len(places), self.dtype)
            for position, (shard, row) in enumerate(places):
                rows_R[position] = self._map(shard)[row]
            return rows_R
        return self._read_remote(places)

    def _place(self, index: int) -> tuple[int, int]:
        """(shard, row in it) of a row."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        shard = bisect.bisect_right(self._ends, index)
        return shard, index - self._ends[shard] + self._shards[shard]["rows"]

    def _offset(self, shard: int) -> int:
        """Bytes of the .npy header."""
        return self._shards[shard]["bytes"] - self._shards[shard]["rows"] * self.dtype.itemsize

    def _open(self, shard: int) -> np.memmap:
        path, rows = self._directory.join(self._shards[shard]["file"]), self._shards[shard]["rows"]
        return np.memmap(path, self.dtype, mode="r", offset=self._offset(shard), shape=(rows,))

    def _read_remote(self, places: list[tuple[int, int]]) -> np.ndarray:
        """One range read a row, as many at once as the filesystem does."""
        paths = [self._directory.join(self._shards[shard]["file"]) for shard, _ in places]
        begins = [self._offset(shard) + row * self.dtype.itemsize for shard, row in places]
        ends = [begin + self.dtype.itemsize for begin in begins]
        try:
            content = b"".join(self._directory.fs.cat_ranges(paths, begins, ends, on_error="raise"))
        except OSError as error:
            raise UserError(f"{self._directory.path}: cannot be read: {first_line(error)}") from error
        return np.frombuffer(content, self.dtype)

    def decode(self, index: int) -> str:
        """The text of a row, without BOS and EOS; a character cut by the row's edge becomes U+FFFD."""
        row = self[index]
        return self.tokenizer.decode(row["tokens"][: row["length"]])
