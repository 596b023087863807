"""Files are replaced as a whole or not at all."""

import os

import pytest
from etils import epath

from mesanet_jax.atomic import write_atomically


@pytest.mark.parametrize("data, content", [("naïve\n", "naïve\n".encode()), (b"\x00\xff", b"\x00\xff")])
def test_content_is_replaced_and_nothing_is_left_beside_it(tmp_path, data, content):
    path = tmp_path / "file.json"
    path.write_bytes(b"old content, longer than the new one")
    write_atomically(path, data)
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["file.json"]


def test_a_failure_keeps_the_old_content(tmp_path, monkeypatch):
    """The disk is full when the new content is flushed."""
    path = epath.Path(tmp_path) / "file.json"
    write_atomically(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


def test_an_object_in_a_bucket_is_written_directly(monkeypatch):
    """A bucket has no rename; its objects appear once they are complete."""
    written = {}
    path = epath.Path("gs://bucket/file.json")
    monkeypatch.setattr(type(path), "write_bytes", lambda self, data: written.update({str(self): data}))
    write_atomically(path, "content")
    assert written == {"gs://bucket/file.json": b"content"}
