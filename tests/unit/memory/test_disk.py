"""The disk store: round trips, order, budgets, privacy, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from belady.errors import SpillError, TierFullError
from belady.memory.disk import DiskStore
from belady.memory.extents import PAGE, round_up
from belady.memory.files import Bytes, Files
from tests.support.memory import SlowFiles, random_bytes

SRC = Path(__file__).parents[3] / "src"
MIB = 2**20


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 8 * MIB, 17 * MIB + 3])
def test_round_trip(tmp_path: Path, nbytes: int, checksum: bool) -> None:
    store = DiskStore(str(tmp_path), checksum=checksum)
    data = random_bytes(nbytes)
    ticket = store.write(data)
    into = torch.empty_like(data)
    store.read(ticket.extent, into).wait()
    assert torch.equal(into, data)
    assert store.used_bytes == store.peak_bytes == round_up(nbytes)
    store.free(ticket.extent)
    store.free(ticket.extent)
    assert store.used_bytes == 0
    store.close()


@pytest.mark.parametrize("start", [0, 1, 64, 4096])
def test_any_alignment_of_memory(tmp_path: Path, start: int) -> None:
    store = DiskStore(str(tmp_path))
    data = random_bytes(3 * PAGE + start)[start:]
    into = torch.zeros(3 * PAGE + start, dtype=torch.uint8)[start:]
    store.read(store.write(data).extent, into).wait()
    assert torch.equal(into, data)
    store.close()


def test_memoryviews(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    into = bytearray(5)
    extent = store.write(memoryview(b"hello")).extent
    store.read(extent, memoryview(into)).wait()
    assert into == b"hello"
    store.write(memoryview(b"")).wait()
    store.close()


def test_read_follows_its_write(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), threads=2, files=SlowFiles(0.02))
    data = [random_bytes(9 * MIB, seed=seed) for seed in range(2)]
    into = [torch.zeros_like(it) for it in data]
    writes = [store.write(it) for it in data]
    reads = [store.read(it.extent, to) for it, to in zip(writes, into, strict=True)]
    for read in reads:
        read.wait()
    assert all(torch.equal(a, b) for a, b in zip(data, into, strict=True))
    store.close()


def test_free_waits_for_reads_and_writes(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), files=SlowFiles(0.02))
    write = store.write(random_bytes(100))
    read = store.read(write.extent, torch.empty(100, dtype=torch.uint8))
    store.free(write.extent)
    assert write.ended
    assert read.ended
    store.close()


def test_reads_of_one_extent_at_once(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    data = random_bytes(5 * PAGE + 5)
    extent = store.write(data).extent
    into = [torch.zeros_like(data) for _ in range(8)]
    for ticket in [store.read(extent, it) for it in into]:
        ticket.wait()
    assert all(torch.equal(it, data) for it in into)
    store.close()


def test_budget_is_exact_whatever_the_holes(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), 6 * PAGE + PAGE - 1)
    extents = [store.allocate(PAGE) for _ in range(6)]
    with pytest.raises(TierFullError, match="budget is 24576 bytes, of which 24576 are used"):
        store.allocate(1)
    for extent in extents[::2]:
        store.free(extent)
    data = random_bytes(3 * PAGE - 7)
    into = torch.empty_like(data)
    ticket = store.write(data)
    assert len(ticket.extent.ranges) == 3
    store.read(ticket.extent, into).wait()
    assert torch.equal(into, data)
    store.close()


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40_000)), max_size=25))
def test_contents_survive_any_order(steps: list[tuple[bool, int]]) -> None:
    store = DiskStore(budget_bytes=40 * PAGE, checksum=True)
    held = []
    for seed, (writes, nbytes) in enumerate(steps):
        if writes:
            data = random_bytes(nbytes, seed=seed)
            if store.used_bytes + round_up(nbytes) > 40 * PAGE:
                with pytest.raises(TierFullError):
                    store.write(data)
            else:
                held.append((data, store.write(data)))
        elif held:
            data, ticket = held.pop(nbytes % len(held))
            into = torch.empty_like(data)
            store.read(ticket.extent, into).wait()
            assert torch.equal(into, data)
            store.free(ticket.extent)
    assert store.used_bytes == sum(round_up(data.numel()) for data, _ in held)
    store.close()


def test_wrong_use_is_refused(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    extent = store.allocate(10)
    with pytest.raises(ValueError, match="cannot be read"):
        store.read(extent, torch.empty(10, dtype=torch.uint8))
    store.write(random_bytes(10), extent).wait()
    with pytest.raises(ValueError, match="cannot be read into 9 bytes"):
        store.read(extent, torch.empty(9, dtype=torch.uint8))
    with pytest.raises(ValueError, match="one-dimensional"):
        store.write(torch.zeros(3))
    with pytest.raises(ValueError, match="one-dimensional"):
        store.write(random_bytes(10)[::2])
    store.close()
    store.close()
    with pytest.raises(SpillError, match="closed"):
        store.write(random_bytes(10))


def test_peak_starts_again(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    extent = store.allocate(10)
    store.allocate(10)
    store.free(extent)
    store.reset_peak()
    assert store.peak_bytes == PAGE
    store.close()


class WatchedFiles(Files):
    """Notes the modes of what is made, before the names go."""

    def __init__(self) -> None:
        self.modes: dict[str, int] = {}

    def unlink(self, path: str) -> None:
        self.modes["file"] = os.stat(path).st_mode & 0o777
        self.modes["folder"] = os.stat(os.path.dirname(path)).st_mode & 0o777
        super().unlink(path)


def test_private_and_nameless(tmp_path: Path) -> None:
    files = WatchedFiles()
    mask = os.umask(0)
    try:
        store = DiskStore(str(tmp_path), files=files)
    finally:
        os.umask(mask)
    assert files.modes == {"file": 0o600, "folder": 0o700}
    assert list(tmp_path.iterdir()) == []
    store.write(random_bytes(100)).wait()
    assert list(tmp_path.iterdir()) == []
    store.close()


def test_what_was_freed_is_gone_without_a_garbage_collector(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path))
    into = torch.empty(100, dtype=torch.uint8)
    gc.disable()
    try:
        write = store.write(random_bytes(100))
        read = store.read(write.extent, into)
        store.free(write.extent)
        tickets = [weakref.ref(write), weakref.ref(read)]
        del write, read
        # A thread of the store lets go of its last part in its own time.
        deadline = time.monotonic() + 5
        while any(it() is not None for it in tickets) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert [it() for it in tickets] == [None, None]
    finally:
        gc.enable()
        store.close()


def test_nothing_leaks(tmp_path: Path) -> None:
    def held() -> tuple[int, set[str]]:
        gc.collect()
        threads = {it.name for it in threading.enumerate() if it.name.startswith("belady")}
        return len(os.listdir("/proc/self/fd")), threads

    before = held()
    store = DiskStore(str(tmp_path))
    store.write(random_bytes(100)).wait()
    assert not any(os.get_inheritable(fd) for fd in store._file._fds)
    store.close()
    assert held() == before
    dropped = DiskStore(str(tmp_path))
    dropped.write(random_bytes(100)).wait()
    pool = dropped._pool
    del dropped
    pool.shutdown()
    assert held() == before


def test_relative_folder_is_resolved_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = DiskStore(".")
    monkeypatch.chdir("/")
    assert store.directory == str(tmp_path.resolve())
    store.write(random_bytes(10)).wait()
    store.close()


@pytest.mark.parametrize("name", ["with space", "with\nnewline", "with\udcff", "ü" * 100])
def test_odd_names(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    DiskStore(str(folder)).close()


@pytest.mark.parametrize("name", ["missing", "file", "dangling", "a" * 300, "nul\0"])
def test_unusable_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(SpillError, match="spill folder"):
        DiskStore(str(tmp_path / name))


def test_folder_that_cannot_be_written_is_refused() -> None:
    # Not by chmod: that does not stop root.
    with pytest.raises(SpillError, match="'/proc'") as caught:
        DiskStore("/proc")
    assert isinstance(caught.value.__cause__, OSError)


class RamFiles(Files):
    def file_system(self, path: str) -> str:
        return "tmpfs"


def test_folder_in_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match=r"lies in memory \(tmpfs\).*spill_dir"):
        DiskStore(str(tmp_path), files=RamFiles())
    DiskStore(str(tmp_path), files=RamFiles(), allow_ram=True).close()


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="needs /dev/shm")
def test_shared_memory_is_known_to_be_memory() -> None:
    assert Files().file_system("/dev/shm") == "tmpfs"
    assert Files().file_system("/proc") == "proc"


def test_interrupt_ends_a_wait(tmp_path: Path) -> None:
    store = DiskStore(str(tmp_path), files=SlowFiles(0.5))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGUSR1))
    try:
        ticket = store.write(random_bytes(100))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        assert not ticket.ended
    finally:
        timer.join()
        signal.signal(signal.SIGUSR1, before)
    store.close()
    assert ticket.ended


class RefusingFiles(Files):
    """A file system without O_DIRECT: it says so at open, or only when bytes come."""

    def __init__(self, at_open: bool) -> None:
        self.at_open = at_open
        self.direct: set[int] = set()

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT and self.at_open:
            raise OSError(22, "Invalid argument")
        fd = super().open(path, flags & ~os.O_DIRECT)
        if flags & os.O_DIRECT:
            self.direct.add(fd)
        return fd

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        if fd in self.direct:
            raise OSError(22, "Invalid argument")
        return super().pwrite(fd, data, offset)


@pytest.mark.parametrize("at_open", [True, False])
def test_direct_io_refused(tmp_path: Path, at_open: bool) -> None:
    store = DiskStore(str(tmp_path), files=RefusingFiles(at_open))
    data = random_bytes(9 * MIB)
    into = torch.empty_like(data)
    store.read(store.write(data).extent, into).wait()
    assert torch.equal(into, data)
    assert not store.direct
    store.close()


CHILD = """
import os, sys, torch
from belady.errors import SpillError
from belady.memory.disk import DiskStore
store = DiskStore(sys.argv[1])
data = torch.arange(100, dtype=torch.uint8)
extent = store.write(data).extent
if (child := os.fork()) == 0:
    try:
        store.write(data)
    except SpillError:
        store.free(extent); store.close()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
into = torch.empty_like(data)
store.read(extent, into).wait()
assert torch.equal(into, data)
store.write(torch.zeros(20_000_000, dtype=torch.uint8))  # and leave with it under way
"""


def test_fork_and_exit(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")
    assert list(tmp_path.iterdir()) == []
