"""Where a preparation's tokenizer comes from; trains a lossless sentencepiece BPE.

Lossless: identity normalisation, byte fallback, white space kept, no space put in front.
"""

import io
import itertools
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from mesanet_jax.data import files, formats, pack_unit, tokenizer
from mesanet_jax.data.files import Directory, Source
from mesanet_jax.data.problems import Problems
from mesanet_jax.data.tokenizer import Tokenizer
from mesanet_jax.errors import UserError
from mesanet_jax.schema import Config

_LONGEST_SENTENCE = 1 << 16  # bytes; the trainer drops longer ones in silence
_CUT = _LONGEST_SENTENCE // 4 - 1  # characters, of at most 4 bytes


def provide(config: Config, sources: dict[str, Sequence[Source]], directory: Directory) -> Tokenizer:
    """The directory's tokenizer: kept from an earlier run, else copied from `tokenizer.path`, else trained."""
    kind, path = config.tokenizer.kind, config.tokenizer.path
    name = tokenizer.KINDS[kind].file
    if name and directory.read(name) is None:
        content = files.read(path, field="config.tokenizer.path") if path else _train(config, sources["train"])
        tokenizer.load(kind, content, name=path)  # refused before it is copied
        directory.write(name, content)
    return pack_unit.load_tokenizer(directory, kind)


def _train(config: Config, sources: Sequence[Source]) -> bytes:
    size, count = config.tokenizer.vocab_size, config.tokenizer.train_documents
    print(f"training a sentencepiece BPE of {size} on the first {count} documents", flush=True)
    return train_sentencepiece(itertools.islice(_texts(config, sources), count), vocab_size=size)


def _texts(config: Config, sources: Sequence[Source]) -> Iterator[str]:
    """The documents of the train split, without the held-out ones."""
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
    """The `.model` file of a BPE of `vocab_size` trained on the texts; the same texts give the same bytes.

    Raises UserError where the texts are too few for the vocabulary.
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
            user_defined_symbols=["\n", "\n\n"],  # sentences end at line ends, so these cannot be learnt
            max_sentence_length=_LONGEST_SENTENCE,
            num_threads=2,  # changes no piece, but is stored in the file: fixed, so that files are equal
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        reason = files.first_line(error).rsplit("] ", 1)[-1]
        message = f"config.tokenizer.vocab_size={vocab_size}: cannot be trained on this text: {reason}"
        raise UserError(message) from error
    return model.getvalue()


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    """The texts line by line, long lines cut."""
    for text in texts:
        for line in text.split("\n"):
            for begin in range(0, len(line), _CUT):
                yield line[begin : begin + _CUT]
