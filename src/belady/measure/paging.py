"""How fast pages of managed memory move: by prefetch out and back, and by faults."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

import torch

from belady.errors import TierFullError
from belady.ir.hardware import Link, ManagedLinks
from belady.ir.trace import Tier
from belady.memory.blocks import Block, Driver, Lease
from belady.memory.lanes import Lanes
from belady.memory.streams import current_stream
from belady.units import format_bytes

MIB = 2**20
SIZES = (2 * MIB, 16 * MIB, 64 * MIB)
_PAGE_BYTES = 4096
_ROUNDS = 3


def managed_links(lanes: Lanes, driver: Driver) -> ManagedLinks:
    """Links of managed memory by one block of at most 64 MiB.

    Rates are those of one direction at a time: both at once are taken to disturb neither. A block
    goes out once before anything is timed, since its pages on the host have to be made first.

    Raises
    ------
    TierFullError
        If the device has not four times as many bytes free as the smallest block.
    TierError
        If the driver refuses.
    """
    free = driver.free_bytes()
    sizes = [size for size in SIZES if 4 * size <= free]
    if not sizes:
        raise TierFullError(f"only {format_bytes(free)} of the device are free")
    block = Block(driver.allocate(sizes[-1]), sizes[-1])
    try:
        return _Measuring(lanes, driver, block).links(sizes)
    finally:
        lanes.drain()
        driver.free(block.pointer)


class _Measuring:
    def __init__(self, lanes: Lanes, driver: Driver, block: Block) -> None:
        self._lanes = lanes
        self._driver = driver
        self._block = block

    def links(self, sizes: list[int]) -> ManagedLinks:
        out: list[tuple[int, float]] = []
        back: list[tuple[int, float]] = []
        fault: list[tuple[int, float]] = []
        self._move(sizes[-1], here=True)
        self._move(sizes[-1], here=False)
        for size in sizes:
            seconds = [self._round(size) for _ in range(_ROUNDS)]
            for curve, least in zip((out, back, fault), map(min, *seconds), strict=True):
                curve.append((size, size / least))
        few = [self._round(_PAGE_BYTES) for _ in range(_ROUNDS)]
        late = tuple(map(min, *few))
        issue = self._issue_seconds()
        ends = (Tier.DEVICE, Tier.HOST)
        return ManagedLinks(
            _link(ends, out, late[0], issue),
            _link(ends[::-1], back, late[1], issue),
            _link(ends[::-1], fault, late[2], 0.0),
        )

    def _round(self, size: int) -> tuple[float, float, float]:
        """Seconds out, back by prefetch, and back by faults."""
        self._move(size, here=True)
        out = self._seconds(lambda: self._move(size, here=False))
        back = self._seconds(lambda: self._move(size, here=True))
        self._move(size, here=False)
        return out, back, self._seconds(lambda: self._read(size))

    def _move(self, size: int, *, here: bool) -> None:
        stream = current_stream(self._lanes.device)
        handle = 0 if stream is None else stream.cuda_stream
        self._driver.prefetch(self._block.pointer, size, here=here, discard=False, stream=handle)

    def _read(self, size: int) -> None:
        self._block.used = size
        # Whoever measures frees the block.
        lease = Lease(self._block, lambda _: None)
        self._driver.tensor(lease).view(torch.int64).sum()

    def _seconds(self, work: Callable[[], None]) -> float:
        start = self._lanes.tick()
        work()
        return max(self._lanes.seconds(start, self._lanes.tick()), 1e-9)

    def _issue_seconds(self) -> float:
        """Host seconds of one prefetch of a few bytes."""
        begun = perf_counter()
        for _ in range(2 * _ROUNDS):
            self._move(_PAGE_BYTES, here=True)
        return (perf_counter() - begun) / (2 * _ROUNDS)


def _link(
    ends: tuple[Tier, Tier], curve: list[tuple[int, float]], latency_s: float, issue_s: float
) -> Link:
    rate = max(rate for _, rate in curve)
    return Link(*ends, tuple(curve), rate, latency_s, "managed", issue_s)
