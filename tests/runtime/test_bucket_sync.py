"""What grows is written here and copied there; a copy that fails loses nothing. (With a real bucket: test_gcs.py.)"""

import shutil
import time

import pytest

from mesanet_jax.runtime import bucket_sync as spool_lib
from mesanet_jax.runtime.bucket_sync import Spool


@pytest.fixture
def there(tmp_path, monkeypatch):
    """A directory that is taken for one in a bucket."""
    monkeypatch.setattr(spool_lib.workdir_lib, "is_local", lambda _: False)
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def await_text(path, text):
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text() == text):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_local_workdir_is_its_own_spool(tmp_path):
    with Spool(tmp_path) as spool:
        assert spool.local == tmp_path
        spool.flush()
    assert tmp_path.exists()


def test_what_grows_is_copied_at_each_flush_and_at_the_end(there):
    (there / "metrics.jsonl").write_text("one\n")
    with Spool(there) as spool:
        metrics = spool.local / "metrics.jsonl"
        assert metrics.read_text() == "one\n"  # a resumed run goes on with it
        for text in ("one\ntwo\n", "one\ntwo\nthree\n"):
            metrics.write_text(text)
            spool.flush()
            await_text(there / "metrics.jsonl", text)
        (spool.local / "goodput.partial").write_text("half written")
        (spool.local / "goodput.json").write_text("{}")
    assert {file.name: file.read_text() for file in there.iterdir()} == {
        "metrics.jsonl": "one\ntwo\nthree\n",
        "goodput.json": "{}",
    }
    assert not spool.local.exists()


def test_failing_copy_is_said_once_and_the_files_stay(there, capsys):
    with Spool(there) as spool:
        shutil.rmtree(there)
        (spool.local / "metrics.jsonl").write_text("one\n")
        for _ in range(2):
            spool._copy()
    assert (spool.local / "metrics.jsonl").read_text() == "one\n"
    said = capsys.readouterr().err
    assert said.count("cannot be copied there, the run goes on") == 1
    assert f"not in {there} but in {spool.local}" in said
    shutil.rmtree(spool.local)


def test_copies_go_on_once_they_can(there, capsys):
    with Spool(there) as spool:
        shutil.rmtree(there)
        (spool.local / "metrics.jsonl").write_text("one\n")
        spool._copy()
        there.mkdir()
    assert (there / "metrics.jsonl").read_text() == "one\n"
    assert "but in" not in capsys.readouterr().err
