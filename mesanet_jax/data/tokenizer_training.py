"""Provides the tokenizer of a preparation; trains a lossless sentencepiece BPE if none is given.

The BPE is lossless because it has byte fallback, does not normalise Unicode or white space, and adds no space in front.
"""

import io
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import sentencepiece

from mesanet_jax.data import files, formats, pack_unit, tokenizer
from mesanet_jax.data.files import Directory, Source
from mesanet_jax.data.problems import Problems
from mesanet_jax.data.tokenizer import Tokenizer
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

_LONGEST_SENTENCE = 1 << 16  # bytes; the trainer silently drops longer ones
_CUT = _LONGEST_SENTENCE // 4 - 1  # characters, each of at most 4 bytes


def provide(config: Config, sources: Mapping[str, Sequence[Source]], directory: Directory) -> Tokenizer:
    """Returns the tokenizer of an output directory.

    If the directory has none yet, the tokenizer is copied from `tokenizer.path` or, if that is empty, trained.

    Raises:
      UserError: the tokenizer's file is missing or unsuitable, or the text is not enough to train one.
    """
    kind, path = config.tokenizer.kind, config.tokenizer.path
    name = tokenizer.KINDS[kind].file
    if name and directory.read(name) is None:
        content = files.read(path, field="config.tokenizer.path") if path else _train(config, sources["train"])
        tokenizer.load(kind, content, name=path)  # an unsuitable file is not copied
        directory.write(name, content)
    return pack_unit.load_tokenizer(directory, kind)


def _train(config: Config, sources: Sequence[Source]) -> bytes:
    size, count = config.tokenizer.vocab_size, config.tokenizer.train_documents
    print(f"training a sentencepiece BPE of {size} tokens on at most {count} documents", flush=True)
    return train_sentencepiece(itertools.islice(_texts(config, sources), count), vocab_size=size)


def _texts(config: Config, sources: Sequence[Source]) -> Iterator[str]:
    """Iterates over the documents of the training split, without those that are held out."""
    problems = Problems(on_error=config.on_error, max_errors=config.max_errors)
    for source in sources:
        kind = formats.infer(source.name) if config.format == "auto" else config.format
        part = formats.Part(source.name, kind)
        for item in formats.read(part, text_field=config.text_field, document=config.document):
            if isinstance(item, formats.Problem):
                problems.add(item)
            elif not pack_unit.held_out(item.text, config.holdout):
                yield item.text


def train_sentencepiece(texts: Iterable[str], *, vocab_size: int) -> bytes:
    """Trains a BPE and returns the content of its `.model` file; the same texts give the same bytes.

    Raises:
      UserError: the texts are too short for the vocabulary.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            split_digits=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            add_dummy_prefix=False,
            user_defined_symbols=["\n", "\n\n"],  # cannot be learnt, because sentences end at line ends
            max_sentence_length=_LONGEST_SENTENCE,
            num_threads=2,  # fixed because the file stores it; the pieces do not depend on it
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = files.first_line(error).rsplit("] ", 1)[-1]
        message = f"config.tokenizer.vocab_size={vocab_size}: cannot be trained on this text: {reason}"
        raise UserError(f"{message}; choose a smaller vocabulary or more text") from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """Splits texts into lines, and long lines into pieces that the trainer does not drop."""
    for text in texts:
        for line in text.split("\n"):
            for begin in range(0, len(line), _CUT):
                yield line[begin : begin + _CUT]
