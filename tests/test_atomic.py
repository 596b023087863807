"""Files are written whole or not at all."""

import pytest

from mesanet_jax.atomic import write_atomically


def test_text_and_bytes_replace_the_file(tmp_path):
    path = tmp_path / "file.json"
    for data in ("naïve", b"\x00\xff"):
        write_atomically(path, data)
        assert path.read_bytes() == (data.encode() if isinstance(data, str) else data)
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    write_atomically(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
