"""Every call of the disk fails once, and for ever: the bytes come back, or a typed error does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from belady.errors import SpillError, TierError, TierFullError
from belady.memory.disk import DiskStore
from belady.memory.files import Bytes, Files
from tests.support.memory import FaultyFiles, random_bytes

SRC = Path(__file__).parents[3] / "src"
MIB = 2**20
IO = frozenset({"pwrite", "pread", "fallocate"})


def eio() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def enospc() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def interrupted() -> OSError:
    return InterruptedError(errno.EINTR, "Interrupted system call")


def busy() -> OSError:
    return BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belady.memory.tickets.CHUNK", 8192)


def cycle(folder: Path, files: Files, checksum: bool = False) -> None:
    """Write, read, free, close; whatever comes back is right."""
    store = DiskStore(str(folder), checksum=checksum, files=files)
    try:
        data = random_bytes(20_001)
        into = torch.zeros_like(data)
        ticket = store.write(data)
        try:
            store.read(ticket.extent, into).wait()
            assert torch.equal(into, data)
        finally:
            store.free(ticket.extent)
            assert store.used_bytes == 0
    finally:
        store.close()


def spill_files_open() -> list[str]:
    folder = Path("/proc/self/fd")
    return [name for name in os.listdir(folder) if "belady-" in os.path.realpath(folder / name)]


def cause_of_failure(folder: Path, files: Files) -> BaseException | None:
    try:
        cycle(folder, files)
    except TierError as error:
        return error.__cause__
    return None


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for ever"])
@pytest.mark.parametrize("error", [eio, enospc])
def test_every_call_fails(tmp_path: Path, error: Callable[[], OSError], for_ever: bool) -> None:
    seen = set()
    for at in range(1, 100):
        folder = tmp_path / str(at)
        folder.mkdir()
        files = FaultyFiles(at, error, for_ever)
        started = time.monotonic()
        cause = cause_of_failure(folder, files)
        assert time.monotonic() - started < 10
        assert cause is None or (isinstance(cause, OSError) and cause.errno == error().errno)
        if not for_ever:
            assert list(folder.iterdir()) == []
        if "close" in files.failed:  # the fault kept the descriptor open, not the store
            for name in spill_files_open():
                os.close(int(name))
        assert spill_files_open() == []
        seen.update(files.failed)
        if not files.failed:
            break
    else:
        pytest.fail("the cycle never ended without a fault")
    assert seen >= {"mkdtemp", "open", "unlink", "rmdir", "fallocate", "pwrite", "pread", "close"}


@pytest.mark.parametrize("error", [interrupted, busy])
def test_interrupted_calls_are_repeated(tmp_path: Path, error: Callable[[], OSError]) -> None:
    for at in range(1, 100):
        files = FaultyFiles(at, error, calls=IO)
        cycle(tmp_path, files, checksum=True)
        if not files.failed:
            return
    pytest.fail("the cycle never ended without a fault")


@pytest.mark.parametrize("call", sorted(IO))
def test_busy_for_ever_is_an_error(tmp_path: Path, call: str) -> None:
    with pytest.raises(SpillError) as caught:
        cycle(tmp_path, FaultyFiles(1, busy, for_ever=True, calls=frozenset({call})))
    assert isinstance(caught.value.__cause__, BlockingIOError)


class ShortFiles(Files):
    """Moves at most ``most`` bytes a call."""

    def __init__(self, most: int) -> None:
        self.most = most

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        return super().pwrite(fd, data[: self.most], offset)

    def pread(self, fd: int, into: Bytes, offset: int) -> int:
        return super().pread(fd, into[: self.most], offset)


class ShortBufferedFiles(ShortFiles):
    """The same without O_DIRECT, so that odd pieces are possible."""

    def open(self, path: str, flags: int) -> int:
        return super().open(path, flags & ~os.O_DIRECT)


@pytest.mark.parametrize("files", [ShortFiles(4096), ShortBufferedFiles(1000)])
def test_short_transfers_are_continued(tmp_path: Path, files: Files) -> None:
    cycle(tmp_path, files, checksum=True)


class StuckFiles(Files):
    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        return 0


def test_write_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), files=StuckFiles())
    ticket = store.write(random_bytes(10))
    with pytest.raises(SpillError, match="writing"):
        ticket.wait()
    store.close()


def test_full_disk_says_how_full(tmp_path: Path) -> None:
    files = FaultyFiles(1, enospc, for_ever=True, calls=frozenset({"fallocate"}))
    store = DiskStore(str(tmp_path), files=files)
    with pytest.raises(TierFullError) as caught:
        store.allocate(5000)
    assert str(tmp_path) in str(caught.value)
    assert "8192 bytes are needed" in str(caught.value)
    assert "bytes are free" in str(caught.value)
    assert store.used_bytes == 0
    store.close()


def test_growth_falls_back_to_what_is_needed(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), files=FaultyFiles(1, enospc, calls=frozenset({"fallocate"})))
    store.allocate(5000)
    assert store._file_bytes == 8192
    store.close()


def test_failed_write_shows_at_the_read(tmp_path: Path) -> None:
    store = DiskStore(
        str(tmp_path), files=FaultyFiles(1, eio, for_ever=True, calls=frozenset({"pwrite"}))
    )
    ticket = store.write(random_bytes(20_000))
    read = store.read(ticket.extent, torch.empty(20_000, dtype=torch.uint8))
    for _ in range(2):
        with pytest.raises(SpillError, match="reading a spilled extent of 20000 bytes") as caught:
            read.wait()
        assert isinstance(caught.value.__cause__, OSError)
        assert caught.value.__cause__.errno == errno.EIO
    with pytest.raises(SpillError, match="writing"):
        ticket.wait()
    store.close()


def test_truncated_file(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    extent = store.write(random_bytes(20_000)).extent
    store.free(store.write(random_bytes(1)).extent)
    assert extent.written is not None
    extent.written.wait()
    os.ftruncate(store._file._fds[0], 12_288)
    with pytest.raises(SpillError, match=r"ends or is full at offset (12288|16384)"):
        store.read(extent, torch.empty(20_000, dtype=torch.uint8)).wait()
    store.close()


@pytest.mark.parametrize("at", [0, 4095, 8192, 19_999])
def test_flipped_bit(tmp_path: Path, at: int) -> None:
    store = DiskStore(str(tmp_path), checksum=True)
    data = random_bytes(20_000)
    ticket = store.write(data)
    ticket.wait()
    os.pwrite(store._file._fds[0], bytes([int(data[at]) ^ 4]), at)
    with pytest.raises(SpillError, match=f"checksum mismatch at offset {at // 8192 * 8192}"):
        store.read(ticket.extent, torch.empty_like(data)).wait()
    store.close()


LIMITED = """
import errno, resource, sys, torch
from belady.errors import SpillError, TierFullError
from belady.memory.disk import DiskStore
MIB = 2**20
store = DiskStore(sys.argv[1], threads=1)
early = store.allocate(4 * MIB)
resource.setrlimit(resource.RLIMIT_FSIZE, (MIB + 100, MIB + 100))
data = torch.ones(4 * MIB, dtype=torch.uint8)
try:
    store.write(data, early).wait()  # a short write first, then EFBIG
except SpillError as error:
    assert error.__cause__.errno == errno.EFBIG, error
else:
    sys.exit("the write should have failed")
try:
    store.allocate(8 * MIB)
except TierFullError as error:
    assert "8388608 bytes are needed" in str(error), error
else:
    sys.exit("the file should not have grown")
store.free(early)
into = torch.empty(MIB, dtype=torch.uint8)
store.read(store.write(data[:MIB]).extent, into).wait()
assert into.all()
store.close()
"""


def test_real_limit_of_the_system(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_no_thread_is_left(tmp_path: Path) -> None:
    with pytest.raises(SpillError):
        cycle(tmp_path, FaultyFiles(1, eio, for_ever=True, calls=frozenset({"pread"})))
    assert not [it for it in threading.enumerate() if it.name.startswith("belady")]
