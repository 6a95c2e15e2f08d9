"""The machine is measured once, remembered, and never in the way."""

from __future__ import annotations

import os
import shutil
import stat
import time
from contextlib import nullcontext
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from belady.errors import SpillError, TierFullError
from belady.ir.files import dumps, loads
from belady.ir.hardware import HardwareProfile, Link
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.measure import probe as module
from belady.measure import rates
from belady.measure.probe import probe
from belady.memory.disk import DiskStore
from belady.memory.files import Files
from belady.memory.lanes import lanes_for
from belady.memory.slab import HostArena

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pytest's folder pass for one on a disk, wherever it is."""
    monkeypatch.setattr(Files, "file_system", lambda *_: "ext4")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "belady"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replace measuring by a made-up result, and count how often it is asked for."""
    calls: list[Any] = []
    links = (
        Link(Tier.DEVICE, Tier.DISK, ((1 << 20, 1e9),), 5e8, 1e-4, "disk"),
        Link(Tier.DISK, Tier.DEVICE, ((1 << 20, 2e9),), 5e8, 1e-4, "disk"),
    )

    def measure(*arguments: Any) -> Any:
        calls.append(arguments)
        return links, ()

    monkeypatch.setattr(module, "_measure", measure)
    return calls


def check_link(link: Link) -> None:
    assert all(rate > 0 for _, rate in link.curve)
    assert all(low < high for (low, _), (high, _) in pairwise(link.curve))
    assert link.duplex_bytes_per_s > 0
    assert 0 < link.latency_s < 1


def test_cpu(cache: Path, tmp_path: Path) -> None:
    profile = probe(CPU, spill_dir=str(tmp_path))
    assert loads(HardwareProfile, dumps(profile)) == profile
    assert profile.device == "cpu"
    assert profile.capacity(Tier.DEVICE) > 1 << 28
    assert profile.capacity(Tier.HOST) == 0
    ends = [(link.source, link.target, link.path) for link in profile.links]
    assert ends == [
        (Tier.DEVICE, Tier.DEVICE, "memory"),
        (Tier.DEVICE, Tier.DISK, "disk"),
        (Tier.DISK, Tier.DEVICE, "disk"),
    ]
    for link in profile.links:
        check_link(link)
    assert profile.allocator == module.CPU_ALLOCATOR
    assert dict(profile.versions)["torch"] == torch.__version__
    assert os.listdir(tmp_path) == ["cache"]


def test_remembers(cache: Path, measured: list[Any], tmp_path: Path) -> None:
    first = probe(CPU, spill_dir=str(tmp_path))
    again = probe(CPU, spill_dir=str(tmp_path))
    assert len(measured) == 1
    assert again.links == first.links
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    probe(CPU, spill_dir=str(tmp_path), refresh=True)
    assert len(measured) == 2


def test_reads_anew_what_changes(
    cache: Path, measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe(CPU, spill_dir=str(tmp_path))
    monkeypatch.setattr(module, "ram", lambda: (12345, 1234))
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    profile = probe(CPU, spill_dir=str(tmp_path))
    assert len(measured) == 1
    assert profile.capacity(Tier.DEVICE) == 12345
    assert dict(profile.settings)["cudnn.benchmark"] == "True"


@pytest.mark.parametrize("content", ["", "{}", "[" * 10**5, "\x00\xff", '{"belady":"Trace"}'])
def test_damaged_cache_is_measured_again(
    cache: Path, measured: list[Any], tmp_path: Path, content: str
) -> None:
    probe(CPU, spill_dir=str(tmp_path))
    (file,) = cache.iterdir()
    file.write_text(content, encoding="latin-1")
    probe(CPU, spill_dir=str(tmp_path))
    assert len(measured) == 2
    loads(HardwareProfile, file.read_text())


@pytest.mark.parametrize("base", ["file", "/proc/belady", "relative", ""])
def test_cache_that_cannot_be_used(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, base: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "nowhere")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / base) if base == "file" else base)
    probe(CPU, spill_dir=str(tmp_path))
    probe(CPU, spill_dir=str(tmp_path))
    assert len(measured) == 2
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("kind", ["missing", "file", "link"])
def test_spill_folder_given_must_be_one(
    cache: Path, measured: list[Any], tmp_path: Path, kind: str
) -> None:
    place = tmp_path / kind
    if kind == "file":
        place.touch()
    if kind == "link":
        place.symlink_to("nowhere")
    with pytest.raises(SpillError):
        probe(CPU, spill_dir=str(place))
    assert measured == []


def test_no_disk_where_the_default_folder_is_memory(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(given: str | None, *_: Any, **__: Any) -> str:
        raise SpillError(f"{given} lies in memory")

    monkeypatch.setattr(module, "check_folder", refuse)
    profile = probe(CPU)
    assert profile.capacity(Tier.DISK) == 0
    assert profile.link(Tier.DEVICE, Tier.DISK) is None
    with pytest.raises(SpillError):
        probe(CPU, spill_dir="/dev/shm")


def test_full_disk_is_noted_and_tried_again(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Any:
        raise TierFullError("no room")

    monkeypatch.setattr(module, "_disk_links", refuse)
    profile = probe(CPU, spill_dir=str(tmp_path))
    assert profile.capacity(Tier.DISK) == 0
    assert dict(profile.settings)["disk"] == "not measured: no room"
    assert not cache.exists()


def test_other_devices_are_refused(cache: Path) -> None:
    with pytest.raises(ValueError, match="meta"):
        probe(torch.device("meta"))


def test_random_state_is_left_alone(cache: Path, tmp_path: Path) -> None:
    state = torch.get_rng_state()
    probe(CPU, spill_dir=str(tmp_path))
    assert torch.equal(torch.get_rng_state(), state)


def test_copies_on_lanes() -> None:
    """The CPU's lanes run the code that times a GPU's."""
    arena = HostArena(None, pin=False)
    out, back = rates.copy_links(lanes_for(CPU), arena, 1 << 20)
    assert (out.source, out.target) == (back.target, back.source) == (Tier.DEVICE, Tier.HOST)
    assert out.path == back.path
    assert [size for size, _ in out.curve] == [64 << 10, 256 << 10, 1 << 20]
    check_link(out)
    check_link(back)
    assert arena.used_bytes == 0
    arena.close()


def test_copies_go_the_right_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes, seen = lanes_for(CPU), set()
    copy = lanes.copy
    arena = HostArena(None, pin=False)

    def spy(lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        base = next(slab for slab in arena._slabs)
        first, last = base.address, base.address + base.nbytes
        seen.add((lane, first <= target.data_ptr() < last, first <= source.data_ptr() < last))
        return copy(lane, target, source, after)

    monkeypatch.setattr(lanes, "copy", spy)
    rates.copy_links(lanes, arena, 1 << 20)
    arena.close()
    assert seen == {(Lane.COPY_OUT, True, False), (Lane.COPY_IN, False, True)}


def test_disk_leaves_nothing(tmp_path: Path) -> None:
    arena, store = HostArena(None, pin=False), DiskStore(str(tmp_path))
    write, read = rates.disk_links(store, arena, Tier.HOST, 2 << 20)
    assert (write.source, write.target) == (read.target, read.source) == (Tier.HOST, Tier.DISK)
    assert [size for size, _ in write.curve] == [1 << 20, 2 << 20]
    assert (arena.used_bytes, store.used_bytes) == (0, 0)
    store.close()
    arena.close()


@pytest.mark.parametrize(("step", "sizes"), [(0.01, 4), (0.03, 2), (0.1, 1)])
def test_the_slower_a_disk_the_less_is_moved(
    step: float, sizes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = (step * n for n in count())
    monkeypatch.setattr(rates, "perf_counter", lambda: next(seconds))
    monkeypatch.setattr(rates, "DISK_SIZES", (1, 2, 3))
    arena, store = HostArena(None, pin=False), DiskStore(str(tmp_path))
    # Each of three tries of a page, and of one try of each size, asks for the time thrice.
    for link in rates.disk_links(store, arena, Tier.HOST, 4 << 10):
        assert [size for size, _ in link.curve] == [1, 2, 3, 4 << 10][:sizes]
    store.close()
    arena.close()


@pytest.mark.parametrize("free_after", [1, 3, 9])
def test_links_in_use_are_measured_again(monkeypatch: pytest.MonkeyPatch, free_after: int) -> None:
    """What others left of a link is neither planned for nor remembered, if it can be helped."""
    tries = 0

    def copies(*_: Any) -> tuple[Link, Link]:
        nonlocal tries
        tries += 1
        duplex = 40e9 if tries >= free_after else (13e9, 15e9, 14e9, 12e9)[tries - 1]
        ends = ((Tier.DEVICE, Tier.HOST), (Tier.HOST, Tier.DEVICE))
        out, back = (Link(*end, ((1 << 28, 50e9),), duplex, 1e-5, "pcie") for end in ends)
        return out, back

    notes: list[tuple[str, str]] = []
    monkeypatch.setattr(module, "copy_links", copies)
    monkeypatch.setattr(module, "HostArena", lambda most, pin: HostArena(most, pin=False))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    links = module._cuda_links(CPU, notes)
    assert tries == (1 if free_after == 1 else 4)
    assert links[0].duplex_bytes_per_s == links[1].duplex_bytes_per_s
    assert links[0].duplex_bytes_per_s == (15e9 if free_after == 9 else 40e9)
    assert [name for name, _ in notes if name == "links"] == ["links"] * (free_after == 9)


def test_what_is_noted_is_not_remembered(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_measure", lambda *_: ((), (("links", "in use"),)))
    assert dict(probe(CPU, spill_dir=str(tmp_path)).settings)["links"] == "in use"
    assert not cache.exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda(cache: Path, tmp_path: Path) -> None:
    device = torch.device("cuda")
    torch.ones(1, device=device)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved(device)
    allocated = torch.cuda.memory_allocated(device)
    start = time.perf_counter()
    profile = probe(device, spill_dir=str(tmp_path))
    assert time.perf_counter() - start < 3
    # Less is possible: the probe gives back what others left in the cache meanwhile.
    assert torch.cuda.memory_reserved(device) <= reserved
    assert torch.cuda.memory_allocated(device) <= allocated
    assert loads(HardwareProfile, dumps(profile)) == profile
    out, back = (
        profile.link(Tier.DEVICE, Tier.HOST),
        profile.link(Tier.HOST, Tier.DEVICE),
    )
    inside = profile.link(Tier.DEVICE, Tier.DEVICE)
    assert out is not None
    assert back is not None
    assert inside is not None
    for link in profile.links:
        check_link(link)
    for link in (out, back):
        assert inside.bytes_per_s > link.bytes_per_s
        assert link.curve[0][1] < link.bytes_per_s
    assert 0 < profile.outside_bytes < profile.capacity(Tier.DEVICE)
    assert profile.capacity(Tier.HOST) > 0
    assert "driver" in dict(profile.versions)
    assert profile.settings == probe(device, spill_dir=str(tmp_path)).settings


@pytest.mark.gpu
def test_cuda_both_ways_at_once_is_not_faster_than_one_way(cache: Path, tmp_path: Path) -> None:
    # Of several: other processes may have the link while copies go one way.
    gained = []
    for _ in range(3):
        shutil.rmtree(cache, ignore_errors=True)
        link = probe(torch.device("cuda"), spill_dir=str(tmp_path)).link(Tier.DEVICE, Tier.HOST)
        assert link is not None
        gained.append(link.duplex_bytes_per_s / link.bytes_per_s)
    assert min(gained) <= 1.2
