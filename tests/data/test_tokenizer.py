"""Tokenizers are lossless, count bytes, never make special ids of text, and have hashes that tell them apart."""

import io
import json

import numpy as np
import pytest
import sentencepiece
import tokenizers

from mesanet_jax.data import tokenizer
from mesanet_jax.data.tokenizer_training import train_sentencepiece
from mesanet_jax.errors import UserError
from tests.helpers.data import austen_texts, random_texts

SPELT = ["<s> </s> <pad> <unk> <0x41>", "<|endoftext|>", "", " ", "\n\n\n", "  a\t\tb  \r\n"]


def gpt2_like() -> bytes:
    """Returns a small byte-level BPE like that of GPT-2."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(austen_texts()[:20], trainer)
    return model.to_str().encode()


FILES = {
    "sentencepiece": lambda: train_sentencepiece(austen_texts()[:20], vocab_size=600),
    "huggingface": gpt2_like,
    "bytes": lambda: None,
}


@pytest.fixture(scope="module", params=FILES)
def tokens(request):
    return tokenizer.load(request.param, FILES[request.param](), name="test")


def test_round_trip(tokens):
    texts = SPELT + random_texts(1, 300) + austen_texts()[:2]
    encoded = tokens.encode(texts)
    assert [tokens.decode(ids) for ids in encoded] == texts
    assert all(ids.dtype == np.int32 for ids in encoded)


def test_encoding_does_not_depend_on_the_batch(tokens):
    texts = random_texts(2, 50)
    together, alone = tokens.encode(texts), [tokens.encode([text])[0] for text in texts]
    assert all(np.array_equal(one, other) for one, other in zip(together, alone))


def test_text_never_becomes_a_special_id(tokens):
    ids = np.concatenate(tokens.encode(SPELT + random_texts(3, 100)))
    assert not np.isin(ids, [tokens.bos_id, tokens.eos_id, tokens.pad_id]).any()
    assert ids.max() < tokens.vocab_size


def test_special_ids_decode_to_nothing(tokens):
    ids = tokens.encode(["some text"])[0].tolist()
    assert tokens.decode([tokens.bos_id, *ids, tokens.eos_id, tokens.pad_id]) == "some text"


def test_token_bytes_add_up_to_the_text(tokens):
    sizes = tokens.token_bytes()
    assert sizes.shape == (tokens.vocab_size,) and sizes.dtype == np.int32
    assert not sizes[[tokens.bos_id, tokens.eos_id, tokens.pad_id]].any()
    for text in SPELT + random_texts(4, 100) + austen_texts()[:1]:
        assert sizes[tokens.encode([text])[0]].sum() == len(text.encode())


def test_gpt2_boundary_token():
    tokens = tokenizer.load("huggingface", gpt2_like(), name="test")
    assert tokens.bos_id == tokens.eos_id == tokens.pad_id


def test_training_is_deterministic_and_keeps_long_lines():
    texts = ["zq" * 200_000] + austen_texts()[:10]  # one line of 400 kB
    model = train_sentencepiece(texts, vocab_size=400)
    assert model == train_sentencepiece(texts, vocab_size=400)
    assert "zq" * 4 in tokenizer.SentencePiece(model).decode(range(400)).replace(" ", "")
    paragraph_break = tokenizer.SentencePiece(model).encode(["a\n\nb"])[0]
    assert len(paragraph_break) == 3


def test_long_texts_are_encoded_as_a_whole_would_be():
    tokens = tokenizer.SentencePiece(FILES["sentencepiece"]())
    text = "\n\n".join(austen_texts()[:8]) + "\n" * 40_000 + "x" * 40_000
    assert np.array_equal(tokens.encode([text])[0], tokens._processor.encode(text))


def test_model_with_a_dummy_prefix():
    model = sentencepiece_model(normalization_rule_name="identity", remove_extra_whitespaces=False)
    tokens = tokenizer.SentencePiece(model)
    texts = ["word", " two  spaces", "\n\n".join(austen_texts()[:3])]
    assert [tokens.decode(ids) for ids in tokens.encode(texts)] == texts


def sentencepiece_model(**options) -> bytes:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(austen_texts()[:5]).split("\n")),
        model_writer=model,
        model_type="bpe",
        minloglevel=2,
        **{"vocab_size": 500, "byte_fallback": True, **options},
    )
    return model.getvalue()


def test_hash_follows_behaviour_not_bytes():
    load = lambda **options: tokenizer.SentencePiece(sentencepiece_model(**options)).hash
    one, two = sentencepiece_model(num_threads=1), sentencepiece_model(num_threads=2)
    assert one != two
    assert tokenizer.SentencePiece(one).hash == tokenizer.SentencePiece(two).hash
    different = [load(), load(vocab_size=501), load(add_dummy_prefix=False), load(normalization_rule_name="identity")]
    assert len(set(different)) == 4


def test_hash_of_json_ignores_layout():
    content = json.loads(gpt2_like())
    same = json.dumps(content, indent=3, sort_keys=True).encode()
    assert tokenizer.HuggingFace(gpt2_like()).hash == tokenizer.HuggingFace(same).hash
    content["pre_tokenizer"]["add_prefix_space"] = True
    assert tokenizer.HuggingFace(json.dumps(content).encode()).hash != tokenizer.HuggingFace(same).hash


def test_files_that_do_not_serve():
    word_level = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    no_special = json.loads(gpt2_like())
    no_special["added_tokens"] = []
    no_special["model"]["vocab"]["<other>"] = no_special["model"]["vocab"].pop("<|endoftext|>")
    wrong = [
        ("sentencepiece", b"nonsense", "not a sentencepiece"),
        ("sentencepiece", sentencepiece_model(byte_fallback=False), "byte fallback"),
        ("huggingface", b"{}", "not a Hugging Face"),
        ("huggingface", word_level.to_str().encode(), "not byte-level"),
        ("huggingface", json.dumps(no_special).encode(), "special tokens"),
    ]
    for kind, content, said in wrong:
        with pytest.raises(UserError, match=f"my.file: .*{said}"):
            tokenizer.load(kind, content, name="my.file")


def test_too_large_a_vocabulary_is_one_line():
    with pytest.raises(UserError, match="vocab_size=5000") as caught:
        train_sentencepiece(["a short text"], vocab_size=5000)
    assert "\n" not in str(caught.value)
