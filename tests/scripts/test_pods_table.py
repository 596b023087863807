"""Tests that the page of compiled pods is the one that its command writes from the records beside it."""

import json
import pathlib
import subprocess
from types import SimpleNamespace

import pytest

from mesanet_jax.aot.topology import parse
from scripts.results import pods_table


def test_the_page_is_what_the_command_writes():
    hint = "python -m scripts.results.pods_table --page"
    assert pods_table.page().splitlines() == pods_table.PAGE.read_text().splitlines(), hint


def test_every_record_belongs_to_a_row():
    done = pods_table.load()
    assert set(done) <= set(pods_table.tasks()) and len(done) == len(pods_table.RECORDS.read_text().splitlines())
    for (spec, pod), facts in done.items():
        assert (facts["config"].replace("_", "-"), facts["topology"]) == (spec.replace(":", "-").replace("_", "-"), pod)
        assert parse(pod)


def test_a_rerun_compiles_what_is_missing(tmp_path, monkeypatch):
    """Three records are missing: both of one config, whose v5p is compiled first, and one whose v5p exists."""
    before = pods_table.load()
    small, large = pods_table.PODS
    gone = [("mesanet:140m", large), ("mesanet:140m", small), ("gla:440m", small)]
    monkeypatch.setattr(pods_table, "RECORDS", tmp_path / "pods.jsonl")
    monkeypatch.setattr(pods_table, "PAGE", tmp_path / "pods.md")
    monkeypatch.setattr("sys.argv", ["pods_table"])
    pods_table.save({key: record for key, record in before.items() if key not in gone})
    tried = []

    def compiled(command, **_):
        """Stands in for mesanet_jax.compile: 16 rows do not fit v5e."""
        options = dict(word.partition("=")[::2] for word in command[3:])
        key = options["--config"].removeprefix("configs/").replace(".py", ""), options["--topology"]
        rows = int(options["--config.train.rows_per_device"])
        tried.append((*key, rows))
        record = {name: value for name, value in before[key].items() if name != "spec"}
        pathlib.Path(options["--json"]).write_text(json.dumps(record))
        return SimpleNamespace(returncode=int(key[1] == small and rows == 16))

    monkeypatch.setattr(subprocess, "run", compiled)
    pods_table.main()
    assert [task[:2] for task in dict.fromkeys(task[:2] for task in tried)] == gone
    assert tried[0] == ("mesanet:140m", large, 16) and tried[1:3] == [("mesanet:140m", small, rows) for rows in (16, 8)]
    assert pods_table.load() == before
    assert pods_table.PAGE.read_text() == pods_table.page()


def test_a_failed_compilation_ends_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(pods_table, "RECORDS", tmp_path / "pods.jsonl")
    monkeypatch.setattr("sys.argv", ["pods_table"])
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(returncode=2))
    with pytest.raises(SystemExit, match="exit status 2: .*mesanet_jax.compile"):
        pods_table.main()
