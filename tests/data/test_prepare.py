"""Prepared rows hold exactly the input text, in every format and split, with and without BOS and EOS."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mesanet_jax import schema
from mesanet_jax.data import packing
from mesanet_jax.data.rows import PackedRows
from mesanet_jax.evals import stream
from mesanet_jax.prepare import prepare
from tests.helpers.data import ROOT, austen_texts, corpus, documents, make_config, write_jsonl


@pytest.mark.parametrize("seq_len", [7, 32, 1000])
@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_documents_come_back_exactly(tmp_path, seq_len, bos, eos):
    texts = corpus(tmp_path)
    made = prepare(make_config(input=tmp_path / "*.zst", output=tmp_path / "out", seq_len=seq_len, bos=bos, eos=eos))[
        "splits"
    ]["train"]
    assert documents(tmp_path / "out") == texts
    assert made["documents"] == len(texts)
    assert made["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert made["words"] == sum(len(text.split()) for text in texts)
    assert made["tokens"] == made["text_bytes"] + len(texts) * (bos + eos)
    assert made["rows"] * (seq_len + 1) == made["tokens"] + made["padding_tokens"]


def test_bos_and_eos_stand_at_the_boundaries(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["ab", "c"])
    prepare(make_config(input=tmp_path / "in.jsonl", output=tmp_path / "out", seq_len=7, eos=True))
    row = PackedRows(str(tmp_path / "out"), "train")[0]
    assert row["tokens"].tolist() == [256, 97, 98, 257, 256, 99, 257, 258]
    assert row["length"] == 7


def test_formats_give_the_same_rows(tmp_path):
    texts = corpus(tmp_path, files=1)
    table = pa.table({"score": range(len(texts)), "text": texts, "meta": [{"redpajama_set_name": "C4"}] * len(texts)})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=5)
    for name in ("in-0.jsonl.zst", "in.parquet"):
        prepare(make_config(input=tmp_path / name, output=tmp_path / name[:6]))
    one, two = (PackedRows(str(tmp_path / name[:6]), "train") for name in ("in-0.jsonl.zst", "in.parquet"))
    assert one.fingerprint == two.fingerprint


def test_splits_of_their_own_files(tmp_path):
    for split in ("train", "validation", "test"):
        write_jsonl(tmp_path / f"{split}.jsonl", [f"{split} text"] * 3)
    prepare(
        make_config(
            input=tmp_path / "train.jsonl",
            validation_input=tmp_path / "validation.jsonl",
            test_input=tmp_path / "test.jsonl",
            output=tmp_path / "out",
        )
    )
    for split in ("train", "validation", "test"):
        assert documents(tmp_path / "out", split) == [f"{split} text"] * 3


def test_holdout_is_a_fraction_chosen_by_text(tmp_path):
    texts = [f"document {number}" for number in range(1000)]
    write_jsonl(tmp_path / "in.jsonl", texts + texts[::-1])
    prepare(make_config(input=tmp_path / "in.jsonl", output=tmp_path / "out", holdout=0.1))
    train, held_out = (documents(tmp_path / "out", split) for split in ("train", "validation"))
    assert 140 < len(held_out) < 260
    assert not set(train) & set(held_out)
    assert sorted(train + held_out) == sorted(texts * 2)


def test_join_is_one_document_over_units(tmp_path):
    rows = [line + "\n" for line in "".join(austen_texts()[:70]).split("\n")]
    for number, part in enumerate((rows[:900], rows[900:])):
        table = pa.table({"text": part})
        pq.write_table(table, tmp_path / f"in-{number}.parquet", row_group_size=300, use_dictionary=False)
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        made = prepare(
            make_config(input=tmp_path / "*.parquet", output=out, document="join", unit_mb=1, eos=True, workers=workers)
        )["splits"]["train"]
        assert len(made["shards"]) > 1 and made["documents"] == 1
        assert made["tokens"] == made["text_bytes"] + 2
        assert made["words"] == sum(len(row.split()) + 1 for row in rows)  # the end of a line counts as a word
        assert "".join(documents(out)) == "".join(rows)
        joined = PackedRows(str(out), "train")
        assert joined.tokenizer.decode(stream.read(joined)[0]) == "".join(rows)
        packed = [np.load(out / shard["file"]) for shard in made["shards"]]
        assert sum(packing.document_starts(shard).sum() for shard in packed) == 1
        assert (packed[0]["tokens"][0, 0], packed[-1]["tokens"][-1][packed[-1]["length"][-1] - 1]) == (256, 257)


def test_limit_counts_documents_over_units(tmp_path):
    texts = corpus(tmp_path)
    config = make_config(input=tmp_path / "*.zst", output=tmp_path / "out", limit_documents=50)
    assert prepare(config)["splits"]["train"]["documents"] == 50
    assert documents(tmp_path / "out") == texts[:50]


def test_row_decodes_to_its_text(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["abcdef", "ghi"])
    prepare(make_config(input=tmp_path / "in.jsonl", output=tmp_path / "out", seq_len=4))
    rows = PackedRows(str(tmp_path / "out"), "train")
    assert [rows.decode(index) for index in range(len(rows))] == ["abcd", "efgh", "i"]


def test_demo_preset(tmp_path):
    config = schema.load_file(f"{ROOT}/configs/prepare.py:demo")
    config.output = str(tmp_path)
    made = prepare(config)
    assert made["vocab_size"] == 2048 and made["seq_len"] == 256
    assert documents(tmp_path) == austen_texts()
    assert made["splits"]["validation"]["documents"] == 10
