"""Managed memory without CUDA: blocks with a side on the device and one on the host."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from belady.errors import TierError
from belady.ir.plan import Assignment, Budget, Decision, Keep, Managed, Plan
from belady.ir.trace import Trace
from belady.memory.blocks import Lease
from belady.memory.lanes import Lanes
from belady.memory.managed import ManagedPool
from belady.memory.paging import Paging
from tests.support.memory import POISON, CarrierUnderTest

Bytes = NDArray[np.uint8]
MIB = 2**20


class TwoSided:
    """A driver whose pages are poison wherever they are not.

    Attributes
    ----------
    faults
        Whether pages that are read fault in; without a device that can only mean that they are
        left readable.
    free
        Bytes that the device is said to have.
    calls
        Movements as ``(address, bytes, here, discard)``.
    fails_at
        The allocation, counted from 0, that is refused.
    """

    def __init__(self, *, faults: bool = False, free: int = 1 << 40) -> None:
        self.faults = faults
        self.room = free
        self.calls: list[tuple[int, int, bool, bool]] = []
        self.fails_at = -1
        self.allocated = 0
        self._here: dict[int, Bytes] = {}
        self._there: dict[int, Bytes] = {}
        self._resident: dict[int, bool] = {}

    def allocate(self, nbytes: int) -> int:
        if self.allocated == self.fails_at:
            raise TierError(
                "CUDA's driver refused cuMemAllocManaged on cpu: out of memory (error 2)"
            )
        self.allocated += 1
        block = np.full(nbytes, POISON, np.uint8)
        pointer = int(block.ctypes.data)
        self._here[pointer], self._there[pointer] = block, block.copy()
        self._resident[pointer] = False
        return pointer

    def free(self, pointer: int) -> None:
        for side in (self._here, self._there, self._resident):
            del side[pointer]

    def prefetch(
        self, pointer: int, nbytes: int, *, here: bool, discard: bool, stream: int
    ) -> None:
        self.calls.append((pointer, nbytes, here, discard))
        source, target = self._there[pointer], self._here[pointer]
        if not here:
            source, target = target, source
        if discard:
            source[:] = target[:] = POISON
        elif self._resident[pointer] is not here:
            target[:] = source
            if here or not self.faults:
                source[:] = POISON
        self._resident[pointer] = here

    def free_bytes(self) -> int:
        return self.room

    def tensor(self, lease: Lease) -> torch.Tensor:
        return torch.from_numpy(np.asarray(_Array(lease)))

    @property
    def blocks(self) -> int:
        return len(self._here)

    def resident(self) -> Iterator[bool]:
        yield from self._resident.values()


class _Array:
    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return self.lease.__cuda_array_interface__


class ManagedCarrier(CarrierUnderTest):
    """A carrier with managed memory on a machine that has none."""

    def __init__(self, lanes: Lanes, driver: TwoSided) -> None:
        self.driver = driver
        self.kept_back: list[int] = []
        super().__init__("cpu", lanes=lanes)

    def make_paging(self) -> Paging:
        make = functools.partial(ManagedPool, self._lanes, self.driver, self.kept_back.append)
        return Paging(self._hub, make)


def random_managed_plan(trace: Trace, seed: int, *, faults: bool) -> Plan:
    """Managed memory for most values, at any times in order."""
    chance = random.Random(seed)
    made = [
        Assignment(value, _decision(trace, value, chance, faults=faults))
        for value in trace.saved
        if trace.storages[trace.values[value].storage].nbytes > 0
    ]
    return Plan(trace.fingerprint, "random/1", Budget(1 << 30), tuple(made))


def _decision(trace: Trace, index: int, chance: random.Random, *, faults: bool) -> Decision:
    value = trace.values[index]
    first = value.first_save
    last = value.dropped if value.first_read is None else value.first_read
    if chance.random() < 0.15:
        return Keep()
    ends = (first, min(first + 1, last), last, chance.randint(first, last))
    out, gone, back, ready = sorted(chance.choice(ends) for _ in range(4))
    if chance.random() < 0.3:
        gone = out
    return Managed(out, gone, ready if faults else back, ready, faults)
