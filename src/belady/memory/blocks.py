"""Managed memory taken from the driver: what plans need, never more than the device has free."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from belady.errors import TierFullError
from belady.memory.fences import Fence
from belady.units import format_bytes

# The driver keeps track of 2 MiB at a time: no two blocks share one.
GRAIN_BYTES = 2**21


class Driver(Protocol):
    """The few calls that managed memory takes; `belady.memory.driver.CudaDriver` makes them."""

    def allocate(self, nbytes: int) -> int:
        """Take a block and give its address.

        Raises
        ------
        TierError
            If the driver refuses.
        """
        ...

    def free(self, pointer: int) -> None:
        """Give a block back once the device has done all its work."""
        ...

    def prefetch(
        self, pointer: int, nbytes: int, *, here: bool, discard: bool, stream: int
    ) -> None:
        """Let a stream move the block to the device (``here``) or to the host.

        ``discard``: nobody needs its bytes any more, so that none need to be moved; whoever needs
        device memory gets theirs.
        """
        ...

    def free_bytes(self) -> int:
        """Bytes of the device that nobody has."""
        ...

    def tensor(self, lease: Lease) -> torch.Tensor:
        """Bytes of a block as a tensor that keeps the lease."""
        ...


@dataclass(eq=False, slots=True)
class Block:
    """Managed memory.

    Attributes
    ----------
    used
        Bytes of the value in it.
    here
        Whether these are on the device, or about to be.
    last
        End of the last movement.
    readers
        Streams that read it.
    """

    pointer: int
    nbytes: int
    used: int = 0
    here: bool = False
    last: Fence | None = None
    readers: set[Any] = field(default_factory=set)


class Lease:
    """A block in use: by a parcel and by every tensor on its bytes, each of which keeps it.

    Parameters
    ----------
    give_back
        Called with the block when the last of them is gone, by a finalizer.
    """

    def __init__(self, block: Block, give_back: Callable[[Block], None]) -> None:
        self.block = block
        self._give_back = give_back

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (self.block.used,),
            "typestr": "|u1",
            "data": (self.block.pointer, False),
            "version": 3,
        }

    def __del__(self) -> None:
        self._give_back(self.block)


class Blocks:
    """Blocks of one device, and which of them are free. Not thread-safe: its owner is."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._claims: weakref.WeakKeyDictionary[object, tuple[Counter[int], int]]
        self._claims = weakref.WeakKeyDictionary()
        self._free: dict[int, list[Block]] = {}
        self._counts: Counter[int] = Counter()

    def claim(self, owner: object, sizes: Mapping[int, int], room_bytes: int) -> None:
        """Note what ``owner`` needs while it lives, see `belady.memory.paging.Paging.claim`."""
        wanted: Counter[int] = Counter()
        for nbytes, count in sizes.items():
            wanted[_grains(nbytes)] += count
        self._claims[owner] = wanted, room_bytes

    def forget(self, owner: object) -> None:
        """``owner`` claims nothing any more."""
        self._claims.pop(owner, None)

    def close(self) -> None:
        """Give all free blocks back, and let nobody claim any."""
        self._claims.clear()
        self.settle()

    def settle(self) -> int:
        """Take the blocks that are claimed, and give back free ones that are not.

        Returns
        -------
        int
            The most room on the device, in bytes, that anybody claims.

        Raises
        ------
        TierFullError
            If the device has not as many bytes free as there would be managed: more of them than
            the device holds can hang it, for all who use it.
        TierError
            If the driver refuses.
        """
        wanted: Counter[int] = Counter()
        room = 0
        for sizes, here in self._claims.values():
            wanted |= sizes
            room = max(room, here)
        for size, blocks in self._free.items():
            while blocks and self._counts[size] > wanted[size]:
                self.release(blocks.pop())
        missing = wanted - self._counts
        if _bytes(missing) > self._driver.free_bytes() - self.total_bytes:
            # Pages that were discarded may count as used: without these blocks they are free.
            for blocks in self._free.values():
                while blocks:
                    self.release(blocks.pop())
            missing = wanted - self._counts
        self._demand_room(_bytes(missing))
        for size, count in missing.items():
            self._free.setdefault(size, []).extend(self._new(size) for _ in range(count))
        return room

    def take(self, nbytes: int) -> Block:
        """Give a free block with room for ``nbytes`` bytes, or a new one.

        Raises
        ------
        TierFullError, TierError
            As `settle`.
        """
        size = _grains(nbytes)
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        self._demand_room(size)
        return self._new(size)

    def put(self, block: Block) -> None:
        """Nobody uses ``block`` any more."""
        self._free.setdefault(block.nbytes, []).append(block)

    def release(self, block: Block) -> None:
        """Give a block back to the driver."""
        self._counts[block.nbytes] -= 1
        self._driver.free(block.pointer)

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks, used or not."""
        return _bytes(self._counts)

    def _demand_room(self, nbytes: int) -> None:
        if not nbytes:
            return
        total, free = self.total_bytes + nbytes, self._driver.free_bytes()
        if total > free:
            raise TierFullError(
                f"{format_bytes(total)} of managed memory are needed, and the device has "
                f"{format_bytes(free)} free: more of it than the device holds can hang the device. "
                "Free some of the device's memory, or take a policy that moves values to pinned "
                "host memory instead, such as 'auto'"
            )

    def _new(self, size: int) -> Block:
        block = Block(self._driver.allocate(size), size)
        self._counts[size] += 1
        return block


def _bytes(counts: Counter[int]) -> int:
    return sum(size * count for size, count in counts.items())


def _grains(nbytes: int) -> int:
    return -(-nbytes // GRAIN_BYTES) * GRAIN_BYTES
