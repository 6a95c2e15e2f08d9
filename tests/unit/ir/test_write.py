"""A file is written whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from belady.ir.files import write


def test_a_name_that_ends_in_gz_is_compressed_the_same_every_time(tmp_path: Path) -> None:
    write(b"text" * 100, tmp_path / "a.json.gz")
    write(b"text" * 100, tmp_path / "b.json.gz")
    content = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(content) == b"text" * 100
    assert content == (tmp_path / "b.json.gz").read_bytes()
    assert content[4:8] == bytes(4)  # the time in its header


def test_a_disk_that_is_full_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.json"
    write(b"old", target)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as caught:
        write(b"new", target)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(target)
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("name", ["none/a.json", "file/a.json", "folder"])
def test_the_error_names_the_file_that_was_asked_for(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="directory") as caught:
        write(b"new", tmp_path / name)
    assert caught.value.filename == str(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
