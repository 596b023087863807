"""Preparing gives the same bytes with any number of workers, interrupted or not."""

import os
import signal
import subprocess
import time
from functools import partial

import pytest

from mesanet_jax.errors import UserError
from mesanet_jax.prepare import prepare
from tests.helpers.data import austen_texts, command, corpus, documents, file_hashes, make_config, write_jsonl


def many_units(tmp_path) -> dict:
    """Returns the settings of a corpus of 6 units, each of which takes a noticeable time."""
    texts = austen_texts()
    for number in range(6):
        write_jsonl(tmp_path / f"in-{number}.jsonl", texts[number * 40 : number * 40 + 40])
    return {
        "input": tmp_path / "*.jsonl",
        "unit_mb": 1,
        "holdout": 0.1,
        "tokenizer__kind": "sentencepiece",
        "tokenizer__vocab_size": 600,
        "tokenizer__train_documents": 20,
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns the settings and the output of an uninterrupted preparation by one worker."""
    folder = tmp_path_factory.mktemp("whole")
    settings = many_units(folder)
    prepare(make_config(output=folder / "out", **settings))
    return settings, folder / "out"


def test_workers_do_not_matter(whole, tmp_path):
    settings, expected = whole
    prepare(make_config(output=tmp_path / "out", workers=2, **settings))
    assert file_hashes(tmp_path / "out") == file_hashes(expected)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
def test_interrupted_and_rerun(whole, tmp_path, sent, workers):
    settings, expected = whole
    settings = settings | {"format": "auto", "workers": workers}
    out = tmp_path / "out"
    # If these tests run in the background, Ctrl-C is ignored, and child processes would inherit that.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(
        command(out, settings), stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heeds
    )
    while not list(out.glob("unit-*.json")):
        assert process.poll() is None
        time.sleep(0.002)
    os.killpg(process.pid, sent) if sent == signal.SIGINT else process.kill()
    _, errors = process.communicate()
    if sent == signal.SIGINT:
        assert process.returncode == 130
        assert errors.count("\n") == 1 and "to resume, run the same command again" in errors
    assert not (out / "manifest.json").exists()
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("unit-*.json")}
    time.sleep(0.5 if workers > 1 else 0)  # workers without a parent finish their unit
    prepare(make_config(output=out, **settings))
    assert file_hashes(out) == file_hashes(expected)
    assert all((out / name).stat().st_mtime_ns == changed for name, changed in kept.items())


def test_second_run_does_nothing(whole, capsys):
    settings, out = whole
    before = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    prepare(make_config(output=out, **settings))
    assert "already prepared" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == before


def test_lost_shard_is_made_again(whole, tmp_path):
    settings, expected = whole
    out = tmp_path / "out"
    prepare(make_config(output=out, **settings))
    (out / "manifest.json").unlink()
    (out / "train-00002.npy").unlink()
    prepare(make_config(output=out, **settings))
    assert file_hashes(out) == file_hashes(expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_len": 64}, "seq_len=32, but now it is 64"),
        ({"bos": False}, "bos=True, but now it is False"),
        ({"tokenizer__vocab_size": 700}, "tokenizer.vocab_size=600, but now it is 700"),
        ({"holdout": 0.2}, "holdout=0.1, but now it is 0.2"),
    ],
)
def test_other_settings_are_refused(whole, change, said):
    settings, out = whole
    with pytest.raises(UserError, match=said):
        prepare(make_config(output=out, **(settings | change)))


def test_settings_can_be_corrected_until_a_unit_is_finished(tmp_path):
    write_jsonl(tmp_path / "in.jsonl", ["text"])
    settings = {"input": tmp_path / "in.jsonl", "output": tmp_path / "out"}
    with pytest.raises(UserError, match="on_error"):
        prepare(make_config(text_field="body", **settings))
    (tmp_path / "out" / "tokenizer.model").write_bytes(b"made for other settings")
    prepare(make_config(**settings))
    assert documents(tmp_path / "out") == ["text"]
    assert not (tmp_path / "out" / "tokenizer.model").exists()


def test_changed_input_is_refused(tmp_path):
    corpus(tmp_path)
    config = make_config(input=tmp_path / "*.zst", output=tmp_path / "out")
    prepare(config)
    size = (tmp_path / "in-1.jsonl.zst").stat().st_size
    write_jsonl(tmp_path / "in-1.jsonl.zst", ["other text"])
    with pytest.raises(UserError, match=f"in-1.jsonl.zst of {size} bytes.*now it is 3 files"):
        prepare(config)
