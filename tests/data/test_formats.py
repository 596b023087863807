"""Every format yields its texts in order, and broken input with its kind and place."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from mesanet_jax.data import files, formats
from mesanet_jax.data.formats import Document, Part, Problem
from mesanet_jax.errors import UserError
from tests.helpers.data import random_texts, write_jsonl


def read(path, *, document="record", format=None, text_field="text", row_groups=None):
    part = Part(str(path), format or formats.infer(str(path)), row_groups)
    return list(formats.read(part, text_field=text_field, document=document))


def texts(items):
    assert all(isinstance(item, Document) for item in items), items
    return [item.text for item in items]


def problems(items):
    return [(item.kind, item.place) for item in items if isinstance(item, Problem)]


WRITTEN = [text for text in random_texts(0, 40) if text.strip()]


def write_parquet(path, written, **options):
    meta = [{"redpajama_set_name": "Test"}] * len(written)
    table = pa.table({"id": list(range(len(written))), "meta": meta, "text": written, "score": [0.5] * len(written)})
    pq.write_table(table, path, **options)
    return path


def test_parquet_row_groups_and_extra_columns(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", WRITTEN, row_group_size=7)
    assert texts(read(path)) == WRITTEN
    assert texts(read(path, row_groups=(1, 3))) == WRITTEN[7:21]
    assert read(path)[8].place == f"{path} row group 1 row 1"


def test_parquet_string_types(tmp_path):
    for kind in (pa.large_string(), pa.dictionary(pa.int32(), pa.string())):
        pq.write_table(pa.table({"text": pa.array(["a", "b", "a"]).cast(kind)}), tmp_path / "a.parquet")
        assert texts(read(tmp_path / "a.parquet")) == ["a", "b", "a"]


def test_parquet_columns_that_do_not_serve(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", WRITTEN)
    (missing,) = read(path, text_field="content")
    assert missing.kind == formats.BAD_COLUMN and "columns: id, meta, text, score" in missing.detail
    (number,) = read(path, text_field="id")
    assert number.kind == formats.BAD_COLUMN and "int64" in number.detail


def test_parquet_broken_rows(tmp_path):
    column = pa.array([b"good", b"\xff\xfe", None, b"  ", b"end"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=2)
    items = read(tmp_path / "a.parquet")
    assert [item.text for item in items if isinstance(item, Document)] == ["good", "end"]
    place = f"{tmp_path}/a.parquet row group"
    assert problems(items) == [
        (formats.BAD_UNICODE, f"{place} 0 row 1"),
        (formats.BAD_TEXT, f"{place} 1 row 0"),
        (formats.EMPTY_DOCUMENT, f"{place} 1 row 1"),
    ]


@pytest.mark.parametrize("keep", [0, 3, 200, -1])
def test_truncated_parquet(tmp_path, keep):
    path = write_parquet(tmp_path / "a.parquet", WRITTEN)
    path.write_bytes(path.read_bytes()[:keep])
    assert problems(read(path)) == [(formats.UNREADABLE, str(path))]


def test_corrupt_parquet_page(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", WRITTEN, row_group_size=10, use_dictionary=False)
    column = pq.ParquetFile(path).metadata.row_group(1).column(2)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset : column.data_page_offset + 40] = b"\xff" * 40
    path.write_bytes(content)
    items = read(path)
    assert texts(items[:10]) == WRITTEN[:10]
    assert problems(items) == [(formats.UNREADABLE, f"{path} row group 0 row 9")]


def test_jsonl_compressions_and_line_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_CHUNK", 11)  # so that lines and frames span several chunks
    plain = write_jsonl(tmp_path / "a.jsonl", WRITTEN).read_bytes()
    half = plain.index(b"\n", len(plain) // 2) - 20
    contents = {
        "a.jsonl": plain,
        "b.jsonl": plain.replace(b"\n", b"\r\n"),
        "c.jsonl": b"\xef\xbb\xbf" + plain.rstrip(b"\n"),
        "d.jsonl": plain.replace(b"\n", b"\n\n"),
        "a.jsonl.gz": gzip.compress(plain[:half]) + gzip.compress(plain[half:]),
        "a.jsonl.zst": zstandard.compress(plain[:half]) + zstandard.compress(b"") + zstandard.compress(plain[half:]),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        assert texts(read(tmp_path / name)) == WRITTEN, name


def test_broken_lines(tmp_path):
    lines = [
        b'{"text": "good"}',
        b'{"text": "cut',
        b'{"content": "other key"}',
        b'{"text": 3}',
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": " \\n"}',
        b'{"text": "last"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    items = read(path)
    assert [item.text for item in items if isinstance(item, Document)] == ["good", "last"]
    kinds = [
        formats.BAD_JSON,
        formats.BAD_TEXT,
        formats.BAD_TEXT,
        formats.BAD_TEXT,
        formats.BAD_UNICODE,
        formats.BAD_UNICODE,
        formats.EMPTY_DOCUMENT,
    ]
    assert problems(items) == [(kind, f"{path}:{number}") for number, kind in enumerate(kinds, 2)]


@pytest.mark.parametrize("ending", ["zst", "gz"])
def test_truncated_and_corrupt_compression(tmp_path, ending):
    compress = {"zst": zstandard.compress, "gz": gzip.compress}[ending]
    path = tmp_path / f"a.jsonl.{ending}"
    content = compress(b'{"text": "good"}\n' * 3) + compress(json.dumps({"text": "x" * 99}).encode() + b"\n")
    path.write_bytes(content[:-6])
    items = read(path)
    assert texts(items[:3]) == ["good"] * 3
    assert [kind for kind, _ in problems(items)][-1] == formats.UNREADABLE
    path.write_bytes(b"not compressed at all")
    assert problems(read(path)) == [(formats.UNREADABLE, str(path))]


def test_missing_file(tmp_path):
    assert problems(read(tmp_path / "gone.jsonl")) == [(formats.UNREADABLE, f"{tmp_path}/gone.jsonl")]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.zst"])
def test_empty_file(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    kind = formats.EMPTY_DOCUMENT if name == "a.txt" else formats.EMPTY_FILE
    assert problems(read(tmp_path / name)) == [(kind, f"{tmp_path}/{name}")]


def test_text_documents(tmp_path):
    path = tmp_path / "a.txt"
    content = "\ufeffone\r\ntwo\r\n\r\n \n\nthree  \nfour"
    path.write_bytes(content.encode())
    assert texts(read(path)) == [content[1:]]
    assert texts(read(path, document="paragraph")) == ["one\r\ntwo", "three  \nfour"]
    assert [item.place for item in read(path, document="paragraph")] == [f"{path}:1", f"{path}:6"]
    lines = read(path, document="line")
    assert [item.text for item in lines if isinstance(item, Document)] == ["one", "two", "three  ", "four"]
    assert [place for _, place in problems(lines)] == [f"{path}:{number}" for number in (3, 4, 5)]
    assert "".join(texts(read(path, document="join"))) == content[1:]


def test_join_keeps_blank_rows(tmp_path):
    rows = [" = Title = \n", "", " \n", "text\n"]
    pq.write_table(pa.table({"text": rows}), tmp_path / "a.parquet")
    assert texts(read(tmp_path / "a.parquet", document="join")) == rows


def test_unknown_ending():
    with pytest.raises(UserError, match="config.format"):
        formats.infer("corpus.csv.gz")


def test_expand(tmp_path):
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)

    def names(patterns):
        return [source.name.removeprefix(f"{tmp_path}/") for source in files.expand(patterns, field="input")]

    assert names(f"{tmp_path}/*.txt") == ["a.txt", "b.txt"]
    assert names(f"{tmp_path}/**/*.txt") == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert names(f"{tmp_path}/b.txt, {tmp_path}/*.txt") == ["b.txt", "a.txt"]
    assert files.expand(f"{tmp_path}/deep/d.md", field="input")[0].size == len("deep/d.md")
    for wrong, said in {
        f"{tmp_path}/*.parquet": "no file matches",
        f"{tmp_path}/none.txt": "no such file",
        str(tmp_path): "is a directory",
        "nosuch://bucket/a.txt": "nosuch",
        "embedded:nothing": "no such file",
    }.items():
        with pytest.raises(UserError, match=said) as caught:
            files.expand(wrong, field="input")
        assert wrong in str(caught.value) and "\n" not in str(caught.value)
