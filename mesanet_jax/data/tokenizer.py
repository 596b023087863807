"""Tokenizers of three kinds behind one interface: sentencepiece, Hugging Face `tokenizer.json`, bytes.

What is promised of each: text never becomes a special id, whatever it spells; encoding loses nothing, so that decoding
the ids of a whole document gives its text back; `hash` changes when the ids of some text could.
"""

import abc
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import sentencepiece
import tokenizers

from mesanet_jax.errors import UserError

# What a vocabulary alone does not tell: dummy prefix, white space and Unicode normalisation.
_PROBE = " a  b\t\n\n\u00a0c\u3000\ufb01\u2460 e\u0301 \u00e9 1234 \U0001f600"
_META_SPACE = "\u2581"  # how sentencepiece spells a space in its pieces
_LONG = 1 << 14  # characters
_CHUNK = re.compile(rf".{{1,{_LONG}}}[^\n]*\n*", re.DOTALL)


class Tokenizer(abc.ABC):
    """Ids in [0, vocab_size). `bos_id`, `eos_id` and `pad_id` are never the ids of text."""

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    hash: str

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The ids of each text, int32, without BOS or EOS."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids. Special ids are left out; half a character at an end becomes U+FFFD."""

    @abc.abstractmethod
    def token_bytes(self) -> np.ndarray:
        """int32 [vocab_size]: the UTF-8 bytes each id stands for, 0 for special ids.

        The denominator of bits per byte, which makes losses of different tokenizers comparable.
        """


class SentencePiece(Tokenizer):
    """A sentencepiece `.model`. With byte fallback nothing is unknown; without it a model is refused."""

    def __init__(self, content: bytes):
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise ValueError("not a sentencepiece .model") from error
        self.vocab_size = self._processor.vocab_size()
        self.bos_id, self.eos_id = self._processor.bos_id(), self._processor.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise ValueError("the sentencepiece model has no BOS or no EOS")
        ids = range(self.vocab_size)
        if not any(map(self._processor.is_byte, ids)):
            raise ValueError("the sentencepiece model has no byte fallback, so it would lose text")
        self.pad_id = self._processor.pad_id() if self._processor.pad_id() >= 0 else self.eos_id
        self._meta_space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _META_SPACE.encode()]
        # A model that puts a space before every text can only be given whole texts, and loses U+2581 to a space.
        self._prefixed = self._processor.id_to_piece(self._processor.encode("x")[0]).startswith(_META_SPACE)
        described = [[self._processor.id_to_piece(i), self._processor.get_score(i), self._is_special(i)] for i in ids]
        self.hash = _sha256(described + [self._processor.encode(_PROBE)])

    def _is_special(self, token: int) -> bool:
        return self._processor.is_control(token) or self._processor.is_unknown(token)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [[text] if self._prefixed else _parts(text) for text in texts]
        encoded = iter(self._processor.encode(list(itertools.chain.from_iterable(parts)), num_threads=1))
        return [np.array(self._joined(of_text, encoded), np.int32) for of_text in parts]

    def _joined(self, parts: list[str], encoded: Iterator[list[int]]) -> list[int]:
        """The ids of a text from those of its parts, taken from `encoded`."""
        ids = (self._meta_space_ids if part == _META_SPACE else part_ids for part, part_ids in zip(parts, encoded))
        return list(itertools.chain.from_iterable(ids))

    def decode(self, ids: Iterable[int]) -> str:
        return self._processor.decode([int(token) for token in ids])

    def token_bytes(self) -> np.ndarray:
        return np.array([self._bytes_of(token) for token in range(self.vocab_size)], np.int32)

    def _bytes_of(self, token: int) -> int:
        if self._processor.is_byte(token):
            return 1
        piece = self._processor.id_to_piece(token)
        return 0 if self._is_special(token) else len(piece.replace(_META_SPACE, " ").encode())


def _parts(text: str) -> list[str]:
    """Parts that are encoded one by one to the ids of the whole.

    A long text is cut behind line ends, which no learnt piece crosses: sentencepiece's time grows faster than length.
    U+2581 stands alone, to be spelt in bytes: encoded as it is, it would come back as a space.
    """
    chunks = _CHUNK.findall(text) if len(text) > _LONG else [text]
    if _META_SPACE not in text:
        return chunks
    return [part for chunk in chunks for part in re.split(f"({_META_SPACE})", chunk)]


class HuggingFace(Tokenizer):
    """A byte-level `tokenizer.json` (GPT-2, Llama 3, Qwen). Others do not give the text back exactly: refused."""

    _BOS = ("<s>", "<bos>", "<|bos|>", "<|begin_of_text|>", "<|endoftext|>")
    _EOS = ("</s>", "<eos>", "<|eos|>", "<|end_of_text|>", "<|endoftext|>")  # GPT-2 has one token for both

    def __init__(self, content: bytes):
        try:
            described = json.loads(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # `tokenizers` raises bare Exception for a file it cannot read
            raise ValueError("not a Hugging Face tokenizer.json") from error
        if "ByteLevel" not in json.dumps(described["decoder"]):
            raise ValueError("the tokenizer.json is not byte-level; use the model's sentencepiece .model instead")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text, not a boundary
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos_id, self.eos_id = self._special(self._BOS), self._special(self._EOS)
        self.pad_id = self.eos_id
        ignored = ("truncation", "padding", "post_processor")
        self.hash = _sha256({key: value for key, value in described.items() if key not in ignored})

    def _special(self, names: Sequence[str]) -> int:
        ids = filter(lambda token: token is not None, map(self._tokenizer.token_to_id, names))
        try:
            return next(ids)
        except StopIteration:
            raise ValueError(f"the tokenizer.json has none of the special tokens {', '.join(names)}") from None

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.int32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        # A byte-level vocabulary spells every byte as one printable character, so characters are bytes; added tokens
        # that are not special are the exception, spelt as they are.
        sizes = np.zeros(self.vocab_size, np.int32)
        for text, token in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[token] = len(text)
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            sizes[token] = 0 if added.special else len(added.content.encode())
        return sizes


class Bytes(Tokenizer):
    """UTF-8 bytes as ids, with three special ids behind them."""

    vocab_size, bos_id, eos_id, pad_id = 259, 256, 257, 258
    hash = hashlib.sha256(b"utf-8 bytes; bos 256, eos 257, pad 258").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < 256).astype(np.int32)


class Kind(NamedTuple):
    """How a tokenizer is made from its file's content, and the file's name in a prepared directory."""

    make: Callable[[bytes | None], Tokenizer]
    file: str | None


KINDS = {
    "sentencepiece": Kind(SentencePiece, "tokenizer.model"),
    "huggingface": Kind(HuggingFace, "tokenizer.json"),
    "bytes": Kind(lambda _: Bytes(), None),
}


def load(kind: str, content: bytes | None, *, name: str) -> Tokenizer:
    """A tokenizer from its file's content. Raises UserError, with the file's `name`, where it does not serve."""
    try:
        return KINDS[kind].make(content)
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
