"""How fast bytes move between tiers: measured by moving some, in less than a second each.

Device links are timed by events of the device, copies issued back-to-back on the lanes that the
engine uses; disk links by the clock of the host, through the store that spills.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter

import numpy as np
import torch

from belady.ir.hardware import Link
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from belady.memory.disk import DiskStore
from belady.memory.fences import Fence
from belady.memory.lanes import Lanes
from belady.memory.slab import Block, HostArena

KIB, MIB = 2**10, 2**20
COPY_SIZES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
DISK_SIZES = (MIB, 8 * MIB, 32 * MIB, 128 * MIB)
PAGE_BYTES = 4 * KIB

_FEW_BYTES = 64
_ROUND_BYTES = 64 * MIB  # copies of one round, as far as they are not more than _MOST_COPIES
_MOST_COPIES = 32
_ROUNDS = 2
_DUPLEX_COPIES = 4
_ISSUED = 32
_DISK_SECONDS = 0.4  # no larger copy is tried once the tries took so long
# The copies of a round wait for so long, so that they are all issued before the first one starts.
_HOLD_S = 2e-3

Pair = tuple[torch.Tensor, torch.Tensor]


def copy_links(lanes: Lanes, arena: HostArena, largest: int) -> tuple[Link, Link]:
    """Links DEVICE to HOST and HOST to DEVICE by copies of at most ``largest`` bytes."""
    sizes = [size for size in COPY_SIZES if size <= largest] or [largest]
    blocks = [arena.alloc(sizes[-1]) for _ in range(2)]
    try:
        near = [_bytes_on(lanes.device, sizes[-1]) for _ in range(2)]
        pairs = {
            Lane.COPY_OUT: (blocks[0].tensor, near[0]),
            Lane.COPY_IN: (near[1], blocks[1].tensor),
        }
        duplex = _duplex_rate(lanes, pairs)
        out, back = (_copy_link(lanes, lane, pair, sizes, duplex) for lane, pair in pairs.items())
        if not lanes.addressable:
            sent, fetched = _issue_seconds(lanes)
            out, back = replace(out, issue_s=sent), replace(back, issue_s=fetched)
    finally:
        lanes.drain()
        _free(arena, blocks)
    return out, back


def memory_link(lanes: Lanes, nbytes: int) -> Link:
    """Link of the device to itself: bytes read and written per second."""
    source, target = (_bytes_on(lanes.device, nbytes) for _ in range(2))
    seconds = min(_seconds_on_device(lanes, target, source) for _ in range(_ROUNDS + 1))
    latency = _seconds_on_device(lanes, target[:_FEW_BYTES], source[:_FEW_BYTES])
    rate = 2 * nbytes / seconds
    issue = 0.0 if lanes.addressable else _pass_seconds(source[:PAGE_BYTES])
    curve = ((2 * nbytes, rate),)
    return Link(Tier.DEVICE, Tier.DEVICE, curve, rate, latency, "memory", issue)


def disk_links(store: DiskStore, arena: HostArena, near: Tier, largest: int) -> tuple[Link, Link]:
    """Links from tier ``near`` to DISK and back, by at most twice ``largest`` bytes on disk."""
    blocks = [arena.alloc(largest) for _ in range(2)]
    try:
        # A file system that compresses must find nothing to compress.
        noise = np.random.default_rng(0).integers(256, size=largest, dtype=np.uint8)
        blocks[0].tensor.copy_(torch.from_numpy(noise))
        return _disk_links(store, near, blocks)
    finally:
        _free(arena, blocks)


def _copy_link(lanes: Lanes, lane: Lane, pair: Pair, sizes: Iterable[int], duplex: float) -> Link:
    few = _copy_seconds(lanes, lane, pair, _FEW_BYTES)
    curve = []
    for size in sizes:
        seconds = min(_copy_seconds(lanes, lane, pair, size) for _ in range(_ROUNDS))
        curve.append((size, size / seconds))
    ends = (Tier.DEVICE, Tier.HOST) if lane is Lane.COPY_OUT else (Tier.HOST, Tier.DEVICE)
    return Link(*ends, tuple(curve), duplex, few, "pcie")


def _copy_seconds(lanes: Lanes, lane: Lane, pair: Pair, size: int) -> float:
    """Seconds of one copy of ``size`` bytes among many on one lane."""
    copies = max(1, min(_MOST_COPIES, _ROUND_BYTES // size))
    target, source = (tensor[:size] for tensor in pair)
    start, home = _hold(lanes)
    last = lanes.copy(lane, target, source, (home,))
    for _ in range(copies - 1):
        last = lanes.copy(lane, target, source, ())
    return _elapsed(lanes, start, home, (last,)) / copies


def _issue_seconds(lanes: Lanes) -> tuple[float, float]:
    """Host seconds of a copy out and of one back, as a carrier issues them."""
    source = _bytes_on(lanes.device, PAGE_BYTES)
    carrier = Carrier(lanes.device, lanes=lanes)
    try:
        carrier.reserve(_ISSUED * PAGE_BYTES)
        best = (float("inf"), float("inf"))
        for _ in range(_ROUNDS + 1):
            begun = perf_counter()
            parcels = [carrier.send(source, Tier.HOST) for _ in range(_ISSUED)]
            for parcel in parcels:
                parcel.wait_sent()
            sent = perf_counter()
            for arrival in [parcel.fetch() for parcel in parcels]:
                arrival.wait()
            ended = perf_counter()
            best = min(best[0], sent - begun), min(best[1], ended - sent)
    finally:
        carrier.close()
    return best[0] / _ISSUED, best[1] / _ISSUED


def _pass_seconds(source: torch.Tensor) -> float:
    """Host seconds of one pass over some bytes, such as a digest."""
    best = float("inf")
    for _ in range(_ROUNDS + 1):
        begun = perf_counter()
        for _ in range(_ISSUED):
            source.view(torch.int64).as_strided((1, 8), (8, 1)).sum(0, dtype=torch.int64)
        best = min(best, perf_counter() - begun)
    return best / _ISSUED


def _duplex_rate(lanes: Lanes, pairs: dict[Lane, Pair]) -> float:
    """Bytes per second each way, both busy: those of the slower way."""
    size = next(iter(pairs.values()))[0].numel()
    best = float("inf")
    for _ in range(_ROUNDS):
        start, home = _hold(lanes)
        for _ in range(_DUPLEX_COPIES):
            ends = [lanes.copy(lane, *pair, (home,)) for lane, pair in pairs.items()]
        best = min(best, _elapsed(lanes, start, home, ends))
    return _DUPLEX_COPIES * size / best


def _hold(lanes: Lanes) -> tuple[object, Fence]:
    """Mark a start that comes after all copies have been issued; they wait for the fence."""
    lanes.hold(_HOLD_S)
    return lanes.tick(), lanes.present()


def _elapsed(lanes: Lanes, start: object, home: Fence, ends: Iterable[Fence]) -> float:
    for end in ends:
        lanes.wait(end, home)
    return max(lanes.seconds(start, lanes.tick()), 1e-9)


def _seconds_on_device(lanes: Lanes, target: torch.Tensor, source: torch.Tensor) -> float:
    start, home = _hold(lanes)
    target.copy_(source)
    return _elapsed(lanes, start, home, ())


def _disk_links(store: DiskStore, near: Tier, blocks: list[Block]) -> tuple[Link, Link]:
    first, second = (block.tensor for block in blocks)
    began = perf_counter()
    tries = [_disk_seconds(store, first[:PAGE_BYTES]) for _ in range(_ROUNDS + 1)]
    write_latency, read_latency = map(min, zip(*tries, strict=True))
    writes, reads = [], []
    for size in (*(n for n in DISK_SIZES if n < first.numel()), first.numel()):
        write, read = _disk_seconds(store, first[:size])
        writes.append((size, size / write))
        reads.append((size, size / read))
        if perf_counter() - began > _DISK_SECONDS:
            break
    duplex = size / _disk_duplex_seconds(store, first[:size], second[:size])
    return (
        Link(near, Tier.DISK, tuple(writes), duplex, write_latency, "disk"),
        Link(Tier.DISK, near, tuple(reads), duplex, read_latency, "disk"),
    )


def _disk_seconds(store: DiskStore, data: torch.Tensor) -> tuple[float, float]:
    """Seconds to write ``data`` and to read it back."""
    extent = store.allocate(data.numel())
    start = perf_counter()
    store.write(data, extent).wait()
    written = perf_counter()
    store.read(extent, data).wait()
    end = perf_counter()
    store.free(extent)
    return max(written - start, 1e-9), max(end - written, 1e-9)


def _disk_duplex_seconds(store: DiskStore, out: torch.Tensor, back: torch.Tensor) -> float:
    """Seconds to write ``out`` and read as many bytes at once."""
    extents = [store.allocate(out.numel()) for _ in range(2)]
    store.write(out, extents[0]).wait()
    start = perf_counter()
    tickets = [store.write(out, extents[1]), store.read(extents[0], back)]
    for ticket in tickets:
        ticket.wait()
    end = perf_counter()
    for extent in extents:
        store.free(extent)
    return max(end - start, 1e-9)


def _bytes_on(device: torch.device, nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8, device=device)


def _free(arena: HostArena, blocks: Iterable[Block]) -> None:
    for block in blocks:
        arena.free(block)
