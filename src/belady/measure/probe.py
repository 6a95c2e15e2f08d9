"""Measure the machine once, and remember what does not change.

Rates of links are kept in the user's cache folder, under a name made from machine, device,
software and file system. What may change between two calls (bytes free, settings) is always read
anew.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from belady._version import __version__
from belady.errors import DocumentError, SpillError, TierError, TierFullError
from belady.ir.files import load, save
from belady.ir.hardware import Allocator, Capacity, HardwareProfile, Link, ManagedLinks
from belady.ir.trace import Tier
from belady.measure.paging import managed_links
from belady.measure.rates import (
    COPY_SIZES,
    DISK_SIZES,
    MIB,
    PAGE_BYTES,
    copy_links,
    disk_links,
    memory_link,
)
from belady.memory.disk import DiskStore
from belady.memory.driver import CudaDriver
from belady.memory.files import Files, SpillFile, check_folder
from belady.memory.lanes import lanes_for, resolve
from belady.memory.slab import HostArena

# torch rounds CUDA requests to 512 bytes. The margin is for what it holds beyond that: blocks
# that do not fit the next request, and segments of 2 to 20 MiB that are partly used.
CUDA_ALLOCATOR = Allocator(round_bytes=512, margin_fraction=0.18, margin_bytes=64 * MIB)
# A CPU budget counts live storage bytes, which torch aligns to 64; nothing is held beyond.
CPU_ALLOCATOR = Allocator(round_bytes=64, margin_fraction=0.0, margin_bytes=0)

HOST_SHARE = 0.8  # of the memory available now; the rest is for the program itself
DISK_RESERVE_BYTES = 1024 * MIB  # never ours: others write there too

_MEASURED = 3  # one more whenever something else is measured: what is remembered is no more valid
_CPU_COPY_BYTES = 64 * MIB
_TRIES = 4  # of links that something else seems to use
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING")
_CGROUP = Path("/sys/fs/cgroup")
_NVIDIA = Path("/proc/driver/nvidia/version")


def probe(
    device: torch.device, *, spill_dir: str | None = None, refresh: bool = False
) -> HardwareProfile:
    """Measure tiers and links of ``device`` and its host.

    Parameters
    ----------
    spill_dir
        Folder for the DISK tier; None is the system's folder for temporary files, or no DISK
        tier where that folder lies in memory.
    refresh
        Measure again even where an earlier result is remembered.

    Returns
    -------
    HardwareProfile
        Without HOST tier for a CPU. The link of DEVICE to itself counts bytes read and written.

    Raises
    ------
    SpillError
        If ``spill_dir`` cannot be used.
    ValueError
        If the device is neither a CPU nor a CUDA device.
    """
    lanes_for(device)
    device = resolve(device)
    folder = _spill_folder(spill_dir)
    cache = _cache_file(device, folder)
    known = None if refresh else _remembered(cache)
    if known is not None:
        return replace(_profile(device, folder, known.links), managed=known.managed)
    links, notes = _measure(device, folder)
    managed, refused = _managed(device)
    notes = (*notes, *refused)
    profile = replace(_profile(device, folder, links), managed=managed)
    if not notes:
        _remember(profile, cache)
    return replace(profile, settings=(*profile.settings, *notes))


def _spill_folder(given: str | None) -> str | None:
    try:
        folder = check_folder(given, Files(), allow_ram=False)
        if given is not None:
            # Whether a file can be made there: by itself the folder may pass, and there is no disk.
            SpillFile(folder, Files()).close()
        return folder
    except SpillError:
        if given is not None:
            raise
        return None


def _measure(
    device: torch.device, folder: str | None
) -> tuple[tuple[Link, ...], tuple[tuple[str, str], ...]]:
    """Measure all links; the notes say what was refused, so that it is tried again next time."""
    links: list[Link] = []
    notes: list[tuple[str, str]] = []
    if device.type == "cuda":
        links += _cuda_links(device, notes)
    else:
        links.append(memory_link(lanes_for(device), _CPU_COPY_BYTES))
    if folder is not None:
        near = Tier.HOST if device.type == "cuda" else Tier.DEVICE
        try:
            links += _disk_links(folder, near)
        except TierError as error:
            notes.append(("disk", f"not measured: {error}"))
    return tuple(links), tuple(notes)


def _cuda_links(device: torch.device, notes: list[tuple[str, str]]) -> list[Link]:
    lanes = lanes_for(device)
    room = min(torch.cuda.mem_get_info(device)[0], ram()[1]) // 8
    largest = max((size for size in COPY_SIZES if size <= room), default=COPY_SIZES[0])
    arena = HostArena(None, pin=True)
    try:
        arena.reserve(2 * largest)
    except TierFullError as error:
        notes.append(("host_memory", f"pageable: {error}"))
        arena = HostArena(None, pin=False)
    try:
        with torch.cuda.device(device):
            copies = copy_links(lanes, arena, largest)
            for _ in range(_TRIES - 1 if _disturbed(copies) else 0):
                again = copy_links(lanes, arena, largest)
                copies = max(copies, again, key=lambda links: links[0].duplex_bytes_per_s)
            notes += _disturbed(copies)
            return [*copies, memory_link(lanes, largest)]
    finally:
        arena.close()
        torch.cuda.empty_cache()  # what was measured with must not stay reserved


def _disturbed(links: Iterable[Link]) -> list[tuple[str, str]]:
    """A note where both ways at once carry less than one way alone: not of the link itself."""
    for link in links:
        if link.duplex_bytes_per_s < link.bytes_per_s / 2:
            rates = f"{link.duplex_bytes_per_s / 1e9:.1f} of {link.bytes_per_s / 1e9:.1f} GB/s"
            return [("links", f"in use by others: {rates} while both ways are busy; not kept")]
    return []


def _managed(
    device: torch.device,
) -> tuple[ManagedLinks | None, tuple[tuple[str, str], ...]]:
    """Links of managed memory, which CUDA alone has; a note where they were not to be had."""
    if device.type != "cuda":
        return None, ()
    try:
        with torch.cuda.device(device):
            return managed_links(lanes_for(device), CudaDriver(device)), ()
    except TierFullError as error:
        return None, (("managed_memory", f"not measured: {error}"),)
    except TierError:
        return None, ()  # nor will it be there next time
    finally:
        torch.cuda.empty_cache()


def _disk_links(folder: str, near: Tier) -> tuple[Link, Link]:
    share = psutil.disk_usage(folder).free // 20  # for each of two extents
    largest = min(DISK_SIZES[-1], share // PAGE_BYTES * PAGE_BYTES)
    if largest < DISK_SIZES[0]:
        raise TierFullError(f"{folder!r} is full")
    arena = HostArena(None, pin=False)
    store = DiskStore(folder)
    try:
        return disk_links(store, arena, near, largest)
    finally:
        store.close()
        arena.close()


def _profile(device: torch.device, folder: str | None, links: tuple[Link, ...]) -> HardwareProfile:
    """Add to measured links what is read anew each time."""
    total, available = ram()
    outside = 0
    capacities = [Capacity(Tier.DEVICE, total)]
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        outside = max(0, total - free - torch.cuda.memory_reserved(device))
        capacities = [
            Capacity(Tier.DEVICE, total),
            Capacity(Tier.HOST, int(HOST_SHARE * available)),
        ]
    if folder is not None and any(link.target is Tier.DISK for link in links):
        free = int(psutil.disk_usage(folder).free)
        capacities.append(Capacity(Tier.DISK, max(0, free - DISK_RESERVE_BYTES)))
    return HardwareProfile(
        name=_name(device),
        device=device.type,
        capacities=tuple(capacities),
        links=links,
        allocator=CUDA_ALLOCATOR if device.type == "cuda" else CPU_ALLOCATOR,
        outside_bytes=outside,
        settings=_settings(),
        versions=_versions(device),
    )


def ram() -> tuple[int, int]:
    """Bytes of memory in all and available now, within the limit of a container."""
    memory = psutil.virtual_memory()
    total, available = int(memory.total), int(memory.available)
    with suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        total, available = min(total, limit), min(available, max(0, limit - used))
    return total, available


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _settings() -> tuple[tuple[str, str], ...]:
    cudnn = torch.backends.cudnn
    return (
        *((name, os.environ[name]) for name in _VARIABLES if name in os.environ),
        ("cudnn.enabled", str(cudnn.enabled)),
        ("cudnn.benchmark", str(cudnn.benchmark)),
        ("cudnn.deterministic", str(cudnn.deterministic)),
    )


def _versions(device: torch.device) -> tuple[tuple[str, str], ...]:
    versions = [("belady", __version__), ("torch", str(torch.__version__))]
    if device.type == "cuda":
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        versions += [
            ("cuda", str(torch.version.cuda)),
            ("driver", _driver()),
            ("cudnn", str(cudnn)),
        ]
    return tuple(versions)


def _driver() -> str:
    """Version of NVIDIA's kernel module, which torch does not tell."""
    with suppress(OSError, StopIteration):
        words = _NVIDIA.read_text(errors="replace").split()
        return next(word for word in words if word[0].isdigit() and "." in word)
    return "unknown"


def _cache_file(device: torch.device, folder: str | None) -> Path | None:
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path(os.path.expanduser("~"), ".cache")
    if not base.is_absolute():
        return None
    place = "" if folder is None else (Files().file_system(folder), os.stat(folder).st_dev)
    key = (_MEASURED, platform.node(), str(device), _name(device), _versions(device), place)
    return base / "belady" / f"hardware-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.json"


def _remembered(cache: Path | None) -> HardwareProfile | None:
    if cache is None:
        return None
    try:
        return load(HardwareProfile, cache)
    except (OSError, DocumentError):
        return None  # absent, unreadable or damaged: measured again


def _remember(profile: HardwareProfile, cache: Path | None) -> None:
    if cache is None:
        return
    with suppress(OSError):  # a cache that cannot be written is done without
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        save(profile, cache)
