"""Tests random access to packed rows, local and remote, and the errors of a broken directory."""

import json

import fsspec
import numpy as np
import pytest

from mesanet_jax.data import manifest
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.errors import UserError
from mesanet_jax.prepare import prepare
from tests.helpers.data import make_config, random_texts, write_jsonl


@pytest.fixture
def prepared(tmp_path):
    names = []
    for number in range(3):
        texts = random_texts(number, 30)
        names.append(str(write_jsonl(tmp_path / f"in-{number}.jsonl", [text for text in texts if text.strip()])))
    validation = write_jsonl(tmp_path / "validation.jsonl", ["some text to validate on"])
    config = make_config(input=",".join(names), validation_input=validation, output=tmp_path / "out")
    prepare(config)
    return config


def test_read_gives_the_stored_rows_in_any_order(prepared):
    rows = PackedRows(prepared.output, "train")
    shards = rows.manifest["splits"]["train"]["shards"]
    stored = np.concatenate([np.load(f"{prepared.output}/{shard['file']}") for shard in shards])
    assert len(rows) == len(stored)
    order = np.random.default_rng(0).permutation(len(rows))
    assert rows.read(order).tobytes() == stored[order].tobytes()
    assert rows[5].tobytes() == stored[5].tobytes()
    for outside in (len(rows), -1):
        with pytest.raises(IndexError):
            rows[outside]


def test_many_shards(tmp_path, monkeypatch):
    for number in range(5):
        write_jsonl(tmp_path / f"in-{number}.jsonl", [f"file {number} " + "x" * 700_000])
    monkeypatch.setattr("mesanet_jax.data.rows._OPEN_SHARDS", 2)
    prepare(make_config(input=tmp_path / "*.jsonl", output=tmp_path / "out", unit_mb=1, seq_len=255))
    rows = PackedRows(str(tmp_path / "out"), "train")
    shards = rows.manifest["splits"]["train"]["shards"]
    assert len(shards) == 5
    firsts = np.cumsum([0] + [shard["rows"] for shard in shards[:-1]])
    assert [rows.decode(first)[:7] for first in firsts] == [f"file {number} " for number in range(5)]
    assert [rows.decode(first)[:7] for first in firsts[::-1]] == [f"file {number} " for number in range(4, -1, -1)]


def test_remote_output_equals_local(prepared):
    local = PackedRows(prepared.output, "train")
    prepared.output = "memory://bucket/prepared"
    prepare(prepared)
    remote = PackedRows(prepared.output, "train")
    assert remote.fingerprint == local.fingerprint
    order = np.random.default_rng(0).permutation(len(local))
    assert remote.read(order).tobytes() == local.read(order).tobytes()
    assert remote.decode(3) == local.decode(3)
    fsspec.filesystem("memory").rm("/bucket", recursive=True)


def change(path, **changes):
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda out: (out / "manifest.json").unlink(), "manifest.json: missing; run"),
        (lambda out: (out / "manifest.json").write_text("{cut"), "manifest.json: not a manifest"),
        (lambda out: (out / "manifest.json").write_text("[]"), "manifest.json: not a manifest"),
        (lambda out: change(out / "manifest.json", version=9), "has version 9, but this program reads version 1"),
        (lambda out: change(out / "manifest.json", seq_len=31), "fingerprint does not match"),
        (lambda out: (out / "train-00000.npy").unlink(), "train-00000.npy: missing"),
        (lambda out: (out / "train-00000.npy").write_bytes(b"x"), "train-00000.npy: 1 bytes instead of"),
    ],
)
def test_broken_directory_is_one_line(prepared, tmp_path, spoil, said):
    spoil(tmp_path / "out")
    with pytest.raises(UserError, match=said) as caught:
        PackedRows(prepared.output, "train")
    assert "\n" not in str(caught.value)


def test_unknown_split_and_directory(prepared, tmp_path):
    with pytest.raises(UserError, match="no split 'test'; splits: train, validation"):
        PackedRows(prepared.output, "test")
    with pytest.raises(UserError, match="none/manifest.json: missing"):
        PackedRows(str(tmp_path / "none"), "train")


def test_exchanged_tokenizer_is_refused(prepared):
    rows = PackedRows(prepared.output, "train")
    rows.manifest["tokenizer"]["hash"] = "another"
    with pytest.raises(UserError, match="not the one that its rows were made with"):
        rows.tokenizer


def test_fingerprint_follows_what_matters(prepared):
    made = PackedRows(prepared.output, "train").manifest
    for key, value in {"seq_len": 1, "bos": False, "eos": True, "vocab_size": 9}.items():
        assert manifest.fingerprint(made | {key: value}) != made["fingerprint"]
    assert manifest.fingerprint(made | {"tokenizer": {"hash": "another"}}) != made["fingerprint"]
    assert manifest.fingerprint(made | {"settings": {}, "problems": {}}) == made["fingerprint"]
