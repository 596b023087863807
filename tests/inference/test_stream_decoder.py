"""The text of tokens that arrive one by one."""

from mesanet_jax.data.tokenizer import Bytes
from mesanet_jax.inference.stream_decoder import StreamDecoder

TEXT = "naïve café — 東京 🎉 done"


def test_stream_never_shows_part_of_a_character():
    ids, decoder = Bytes().encode([TEXT])[0].tolist(), StreamDecoder(Bytes().decode)
    pieces = [decoder.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == TEXT and decoder.finish() == ""
    assert pieces[ids.index(0xC3) : ids.index(0xC3) + 2] == ["", "ï"]  # as soon as it is complete


def test_stream_keeps_bytes_that_are_really_broken():
    decoder = StreamDecoder(Bytes().decode)
    pieces = [decoder.push(token) for token in [0x61, 0xE6, 0x62, 0xF0, 0x9F]]
    assert pieces == ["a", "", "\ufffdb", "", ""]
    assert decoder.finish() == "\ufffd"


def test_stream_leaves_out_the_prompt():
    prompt = Bytes().encode(["It is"])[0].tolist()
    assert StreamDecoder(Bytes().decode, prompt).push(ord("!")) == "!"
