"""Growing files are copied to the bucket, and a copy that fails loses nothing (test_gcs.py uses a storage server)."""

import shutil
import time

import pytest

from mesanet_jax.runtime import bucket_sync
from mesanet_jax.runtime.bucket_sync import BucketSync


@pytest.fixture
def there(tmp_path, monkeypatch):
    """Makes a directory that is treated as one in a bucket."""
    monkeypatch.setattr(bucket_sync.workdir_lib, "is_local", lambda _: False)
    folder = tmp_path / "there"
    folder.mkdir()
    return folder


def await_text(path, text):
    deadline = time.monotonic() + 30
    while not (path.exists() and path.read_text() == text):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_local_directory_of_a_local_workdir_is_the_workdir(tmp_path):
    with BucketSync(tmp_path) as sync:
        assert sync.local == tmp_path
        sync.flush()
    assert tmp_path.exists()


def test_what_grows_is_copied_at_each_flush_and_at_the_end(there):
    (there / "metrics.jsonl").write_text("one\n")
    with BucketSync(there) as sync:
        metrics = sync.local / "metrics.jsonl"
        assert metrics.read_text() == "one\n"  # a resumed run continues it
        for text in ("one\ntwo\n", "one\ntwo\nthree\n"):
            metrics.write_text(text)
            sync.flush()
            await_text(there / "metrics.jsonl", text)
        (sync.local / "goodput.partial").write_text("half written")
        (sync.local / "goodput.json").write_text("{}")
    assert {file.name: file.read_text() for file in there.iterdir()} == {
        "metrics.jsonl": "one\ntwo\nthree\n",
        "goodput.json": "{}",
    }
    assert not sync.local.exists()


def test_a_failing_copy_is_reported_once_and_the_files_stay(there, capsys):
    with BucketSync(there) as sync:
        shutil.rmtree(there)
        (sync.local / "metrics.jsonl").write_text("one\n")
        for _ in range(2):
            sync._copy()
    assert (sync.local / "metrics.jsonl").read_text() == "one\n"
    said = capsys.readouterr().err
    assert said.count("cannot copy metrics to it, the run continues") == 1
    assert f"not in {there}; they are in {sync.local}" in said
    shutil.rmtree(sync.local)


def test_copies_continue_once_they_can(there, capsys):
    with BucketSync(there) as sync:
        shutil.rmtree(there)
        (sync.local / "metrics.jsonl").write_text("one\n")
        sync._copy()
        there.mkdir()
    assert (there / "metrics.jsonl").read_text() == "one\n"
    assert "they are in" not in capsys.readouterr().err
