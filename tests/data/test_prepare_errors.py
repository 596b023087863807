"""Preparing reports each mistake in one clear line: in the input, the config, the disk or the processes."""

import json
import subprocess

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mesanet_jax.data import pool
from mesanet_jax.errors import UserError
from mesanet_jax.prepare import prepare
from tests.helpers.data import Item, command, die_on_second, documents, make_config, write_jsonl


def broken_corpus(tmp_path) -> list[str]:
    """Writes two files: the first has a broken line and an empty document, the second is truncated."""
    good = [f"good text {number}" for number in range(20)]
    lines = [json.dumps({"text": text}) for text in good[:10]]
    lines[3:3] = ['{"text": "cut', '{"text": ""}']
    (tmp_path / "in-0.jsonl").write_text("\n".join(lines) + "\n")
    write_jsonl(tmp_path / "in-1.jsonl.zst", good[10:])
    second = tmp_path / "in-1.jsonl.zst"
    second.write_bytes(second.read_bytes() + b"\x28\xb5\x2f\xfd\x00")
    return good


@pytest.mark.parametrize("workers", [1, 2])
def test_problems_are_fatal_or_counted(tmp_path, capsys, workers):
    good = broken_corpus(tmp_path)
    settings = {"input": tmp_path / "in-*", "output": tmp_path / "out", "workers": workers}
    with pytest.raises(UserError, match=r"in-0.jsonl:4: invalid JSON: .*on_error=skip"):
        prepare(make_config(**settings))
    made = prepare(make_config(on_error="skip", **settings))
    assert documents(tmp_path / "out") == good
    assert made["problems"]["counts"] == {"invalid JSON": 1, "empty document": 1, "unreadable file": 1}
    assert made["problems"]["places"][0].startswith(f"{tmp_path}/in-0.jsonl:4: invalid JSON")
    assert f"{tmp_path}/in-1.jsonl.zst:10: unreadable file" in capsys.readouterr().out


def test_too_many_problems(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "good"}\n' + "broken\n" * 5)
    settings = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out", "on_error": "skip"}
    with pytest.raises(UserError, match=r"config.max_errors=3; .*in.jsonl:2"):
        prepare(make_config(max_errors=3, **settings))
    assert prepare(make_config(max_errors=5, **settings))["splits"]["train"]["documents"] == 1


def test_missing_column_names_those_there(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "in.parquet")
    with pytest.raises(UserError, match="in.parquet.*no column 'text'; columns: body, id"):
        prepare(make_config(input=tmp_path / "in.parquet", output=tmp_path / "out"))


@pytest.mark.parametrize("name", ["in.jsonl", "in.txt", "in.jsonl.zst"])
def test_no_documents(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=f"no documents for the train split: 1 empty .*{name}"):
        prepare(make_config(input=tmp_path / name, output=tmp_path / "out"))


def test_wrong_configs(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["text"])
    good = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out"}
    wrong = [
        ({"output": ""}, "config.output: is empty"),
        ({"input": ""}, "config.input: is empty"),
        ({"input": tmp_path / "*.parquet"}, "config.input=.*no file matches"),
        (
            {"validation_input": tmp_path / "in.jsonl"},
            "in.jsonl: is an input of both the train and the validation split",
        ),
        ({"holdout": 1.0}, "config.holdout=1.0"),
        ({"holdout": 0.1, "document": "join"}, "config.holdout"),
        ({"document": "line"}, "config.document=line.*jsonl"),
        ({"tokenizer__kind": "huggingface"}, "config.tokenizer.path: is empty"),
        ({"tokenizer__kind": "huggingface", "tokenizer__path": tmp_path / "none.json"}, "none.json: cannot be read"),
        ({"tokenizer__kind": "huggingface", "tokenizer__path": tmp_path / "in.jsonl"}, "not a Hugging Face"),
        ({"output": tmp_path / "in.jsonl"}, "in.jsonl: is a file"),
        ({"output": tmp_path / "in.jsonl" / "out"}, "out: cannot be written: Not a directory"),
        ({"format": "csv"}, "config.format=csv: choose one of"),
    ]
    for change, said in wrong:
        with pytest.raises(UserError, match=said) as caught:
            prepare(make_config(**(good | change)))
        assert "\n" not in str(caught.value)


def test_command_line_mistakes_exit_with_2(tmp_path):
    flags = {"--config.tokeniser.kind=bytes": "did you mean", "--config.input=/none.jsonl": "no such file"}
    for flag, said in flags.items():
        done = subprocess.run(command(tmp_path / "out", {}, flag), capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ") and said in done.stderr and done.stderr.count("\n") == 1


def test_full_disk_is_one_line(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["text" * 100_000])
    settings = {"input": tmp_path / "in.jsonl", "tokenizer__kind": "bytes", "workers": 1}
    limited = ["bash", "-c", 'ulimit -f 100; exec "$0" "$@"', *command(tmp_path / "out", settings)]
    done = subprocess.run(limited, capture_output=True, text=True)
    assert done.returncode == 2
    assert "out: cannot be written: File too large" in done.stderr and done.stderr.count("\n") == 1
    assert not list((tmp_path / "out").glob(".*.partial"))


def test_worker_death_names_the_unit():
    with pytest.raises(UserError, match="second: its worker process died"):
        list(pool.run(die_on_second, [Item("first"), Item("second")], workers=1, report=lambda *done: None))
