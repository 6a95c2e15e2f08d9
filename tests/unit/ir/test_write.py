"""A file is written whole or not at all."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import pytest

from belady.ir.files import require_writable, write

FAILING = ["none/a.json", "file/a.json", "folder", "pipe"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    return tmp_path


def test_a_name_that_ends_in_gz_is_compressed_the_same_every_time(tmp_path: Path) -> None:
    write(b"text" * 100, tmp_path / "a.json.gz")
    write(b"text" * 100, tmp_path / "b.json.gz")
    content = (tmp_path / "a.json.gz").read_bytes()
    assert gzip.decompress(content) == b"text" * 100
    assert content == (tmp_path / "b.json.gz").read_bytes()
    assert content[4:8] == bytes(4)  # the time in its header


def test_a_link_leads_to_what_is_written_and_who_may_read_it_stays(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "a.json", tmp_path / "a.json"
    write(b"old", target)
    target.chmod(0o600)
    link.symlink_to(target)
    write(b"new", link)
    assert link.is_symlink()
    assert target.read_bytes() == b"new"
    assert target.stat().st_mode & 0o777 == 0o600
    dangling = tmp_path / "b.json"
    dangling.symlink_to(tmp_path / "real" / "b.json")
    write(b"new", dangling)
    assert dangling.is_symlink()
    assert (tmp_path / "real" / "b.json").read_bytes() == b"new"
    assert len(list((tmp_path / "real").iterdir())) == 2


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


def contents(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("name", FAILING)
def test_the_error_names_the_file_that_was_asked_for(name: str, folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(OSError, match=r"directory|regular file") as caught:
        write(b"new", folder / name)
    assert caught.value.filename == str(folder / name)
    assert contents(folder) == before


@pytest.mark.parametrize("name", FAILING)
def test_what_could_not_be_written_is_known_before(name: str, folder: Path) -> None:
    before = contents(folder)
    with pytest.raises(OSError, match=r"directory|regular file") as caught:
        require_writable(folder / name)
    assert caught.value.filename == str(folder / name)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["file", "new"])
def test_what_could_be_written_is_left_as_it_is(name: str, folder: Path) -> None:
    (folder / "file").write_bytes(b"old")
    before = contents(folder)
    require_writable(folder / name)
    assert contents(folder) == before
