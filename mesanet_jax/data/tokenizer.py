"""Provides three kinds of tokenizers with the same interface: sentencepiece, Hugging Face `tokenizer.json` and bytes.

Each of them guarantees that
- text never becomes a special token, whatever it spells;
- encoding is lossless: decoding the ids of a whole document returns its text;
- `hash` changes whenever the ids of any text could change.
"""

import abc
import hashlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import sentencepiece
import tokenizers

from mesanet_jax.data.hashing import sha256_of_json
from mesanet_jax.errors import UserError

# Its ids reveal what a vocabulary does not: a dummy prefix, and the normalisation of white space and Unicode.
_PROBE = " a  b\t\n\n\u00a0c\u3000\ufb01\u2460 e\u0301 \u00e9 1234 \U0001f600"
_META_SPACE = "\u2581"  # stands for a space in the pieces of sentencepiece
_LONG = 1 << 14  # characters
_CHUNK = re.compile(rf".{{1,{_LONG}}}[^\n]*\n*", re.DOTALL)


class Tokenizer(abc.ABC):
    """Converts between text and token ids.

    Attributes:
      vocab_size: ids are in [0, vocab_size).
      bos_id, eos_id, pad_id: special ids, which text never has.
      hash: changes whenever the ids of any text could change.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    pad_id: int
    hash: str

    @abc.abstractmethod
    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32, without BOS and EOS."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Returns the text of the ids, without special ids; an incomplete character at an end becomes U+FFFD."""

    @abc.abstractmethod
    def token_bytes(self) -> np.ndarray:
        """Returns int32 [vocab_size], the number of UTF-8 bytes that each id stands for; 0 for special ids.

        Bits per byte divide by these numbers, which makes the losses of different tokenizers comparable.
        """


class SentencePiece(Tokenizer):
    """A sentencepiece model. It must have byte fallback, without which it could not represent all text."""

    def __init__(self, content: bytes):
        """Loads the content of a .model file.

        Raises:
          ValueError: the content is not a suitable model.
        """
        self._processor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(content)
        except RuntimeError as error:
            raise ValueError("this is not a sentencepiece .model") from error
        self.vocab_size = self._processor.vocab_size()
        self.bos_id, self.eos_id = self._processor.bos_id(), self._processor.eos_id()
        if self.bos_id < 0 or self.eos_id < 0:
            raise ValueError("the sentencepiece model has no BOS or no EOS token; use one that has both")
        ids = range(self.vocab_size)
        if not any(map(self._processor.is_byte, ids)):
            raise ValueError("the sentencepiece model has no byte fallback, so it would lose text; use one that has it")
        self.pad_id = self._processor.pad_id() if self._processor.pad_id() >= 0 else self.eos_id
        self._meta_space_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in _META_SPACE.encode()]
        # A model that puts a space before every text must be given whole texts; with it, U+2581 becomes a space.
        self._prefixed = self._processor.id_to_piece(self._processor.encode("x")[0]).startswith(_META_SPACE)
        described = [[self._processor.id_to_piece(i), self._processor.get_score(i), self._is_special(i)] for i in ids]
        self.hash = sha256_of_json(described + [self._processor.encode(_PROBE)])

    def _is_special(self, token: int) -> bool:
        return self._processor.is_control(token) or self._processor.is_unknown(token)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        parts = [[text] if self._prefixed else _parts(text) for text in texts]
        encoded = iter(self._processor.encode(list(itertools.chain.from_iterable(parts)), num_threads=1))
        return [np.array(self._joined(of_text, encoded), np.int32) for of_text in parts]

    def _joined(self, parts: list[str], encoded: Iterator[list[int]]) -> list[int]:
        """Returns the ids of a text; `encoded` yields the ids of its parts."""
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
    """Splits a text into parts whose ids, one after the other, are the ids of the text.

    A long text is cut after line ends, which no learnt piece crosses, because the time of sentencepiece grows faster
    than the length of the text. U+2581 becomes a part of its own, which is then encoded as bytes: otherwise, decoding
    would return a space in its place.
    """
    chunks = _CHUNK.findall(text) if len(text) > _LONG else [text]
    if _META_SPACE not in text:
        return chunks
    return [part for chunk in chunks for part in re.split(f"({_META_SPACE})", chunk)]


class HuggingFace(Tokenizer):
    """A `tokenizer.json` of Hugging Face.

    It must be byte-level, like those of GPT-2, Llama 3 and Qwen, because others are not lossless.
    """

    _BOS = ("<s>", "<bos>", "<|bos|>", "<|begin_of_text|>", "<|endoftext|>")
    _EOS = ("</s>", "<eos>", "<|eos|>", "<|end_of_text|>", "<|endoftext|>")  # GPT-2 has one token for both

    def __init__(self, content: bytes):
        """Loads the content of a tokenizer.json.

        Raises:
          ValueError: the content is not a suitable tokenizer.
        """
        try:
            described = json.loads(content)
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
        except Exception as error:  # `tokenizers` raises a plain Exception if it cannot read the content
            raise ValueError("this is not a Hugging Face tokenizer.json") from error
        if "ByteLevel" not in json.dumps(described["decoder"]):
            raise ValueError("the tokenizer.json is not byte-level; use the model's sentencepiece .model instead")
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a document is text
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.bos_id, self.eos_id = self._special(self._BOS), self._special(self._EOS)
        self.pad_id = self.eos_id
        ignored = ("truncation", "padding", "post_processor")
        self.hash = sha256_of_json({key: value for key, value in described.items() if key not in ignored})

    def _special(self, names: Sequence[str]) -> int:
        """Returns the id of the first of the `names` that the vocabulary has."""
        for token in map(self._tokenizer.token_to_id, names):
            if token is not None:
                return token
        raise ValueError(f"the tokenizer.json has none of the special tokens {', '.join(names)}; add one of them")

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(item.ids, np.int32) for item in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=True)

    def token_bytes(self) -> np.ndarray:
        # A byte-level vocabulary writes every byte as one printable character, so the length of a token is its number
        # of bytes. Added tokens that are not special are written as they are.
        sizes = np.zeros(self.vocab_size, np.int32)
        for text, token in self._tokenizer.get_vocab(with_added_tokens=False).items():
            sizes[token] = len(text)
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            sizes[token] = 0 if added.special else len(added.content.encode())
        return sizes


class Bytes(Tokenizer):
    """The bytes of UTF-8 as ids 0 to 255, followed by the ids of BOS, EOS and padding."""

    vocab_size, bos_id, eos_id, pad_id = 259, 256, 257, 258
    hash = hashlib.sha256(b"utf-8 bytes; bos 256, eos 257, pad 258").hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < 256).astype(np.int32)


class Kind(NamedTuple):
    """How to make a tokenizer from the content of its file, and the name of the file in a prepared directory."""

    make: Callable[[bytes], Tokenizer]
    file: str | None


KINDS = {
    "sentencepiece": Kind(SentencePiece, "tokenizer.model"),
    "huggingface": Kind(HuggingFace, "tokenizer.json"),
    "bytes": Kind(lambda _: Bytes(), None),
}


def load(kind: str, content: bytes | None, *, name: str) -> Tokenizer:
    """Makes a tokenizer from the content of its file.

    Args:
      kind: one of KINDS.
      content: None for a kind without a file.
      name: the name of the file, for the error.

    Raises:
      UserError: the file is not a suitable tokenizer of this kind.
    """
    if content is None and KINDS[kind].file:
        raise UserError(f"{name}: missing; copy the file again, or prepare the data again")
    try:
        return KINDS[kind].make(content or b"")
    except ValueError as error:
        raise UserError(f"{name}: {error}") from error
