"""Carriers whose copies are late, whose freed bytes are poison, and whose disk fails on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVarTuple

import numpy as np
import torch

from belady.ir.timeline import Lane
from belady.memory.carrier import Carrier
from belady.memory.disk import DiskStore
from belady.memory.fences import Fence
from belady.memory.files import Bytes, Files
from belady.memory.lanes import CpuLanes, CudaLanes, Lanes, resolve
from belady.memory.slab import Block, HostArena
from belady.memory.tickets import Extent

POISON = 0xFF
CYCLES_PER_SECOND = 1.5e9  # of torch.cuda._sleep, roughly


class SlowFiles(Files):
    """A disk on which every read and write begins late."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def pwrite(self, fd: int, data: Bytes, offset: int) -> int:
        time.sleep(self.seconds)
        return super().pwrite(fd, data, offset)

    def pread(self, fd: int, into: Bytes, offset: int) -> int:
        time.sleep(self.seconds)
        return super().pread(fd, into, offset)


class FaultyFiles(Files):
    """A disk of which the ``at``-th call (from 1) fails, once or from then on for ever."""

    CALLS = frozenset(
        {
            "mkdtemp", "open", "close", "unlink", "rmdir", "fallocate", "pwrite", "pread",
            "free_bytes", "file_system",
        }
    )  # fmt: skip

    def __init__(
        self,
        at: int,
        error: Callable[[], OSError],
        for_ever: bool = False,
        calls: frozenset[str] = CALLS,
    ) -> None:
        self.at, self.error, self.for_ever = at, error, for_ever
        self.count = 0
        self.failed: list[str] = []
        self._lock = threading.Lock()
        for name in calls:
            setattr(self, name, self._guard(name, getattr(self, name)))

    def _guard(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any) -> Any:
            with self._lock:
                self.count += 1
                fails = self.count == self.at or (self.for_ever and self.count > self.at)
                if fails:
                    self.failed.append(name)
            if fails:
                raise self.error()
            return call(*args)

        return guarded


Ts = TypeVarTuple("Ts")


@dataclass(slots=True, eq=False)
class ThreadFence(Fence):
    """Passed once its event is set."""

    event: threading.Event

    def synchronize(self) -> None:
        assert self.event.wait(30)


class ThreadLanes(Lanes):
    """A device in host memory whose two copy lanes are threads: asynchrony without a GPU.

    Compute is the calling thread. The system is not supposed to reach the memory directly, so
    the way to disk goes through staging, as on a GPU.
    """

    addressable = False

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(torch.device("cpu"))
        self.delays = dict.fromkeys((Lane.COPY_OUT, Lane.COPY_IN), seconds)
        self.held = {lane: threading.Event() for lane in self.delays}
        for event in self.held.values():
            event.set()
        self._pools = {
            lane: ThreadPoolExecutor(1, thread_name_prefix="lane") for lane in self.delays
        }
        self.issued: list[ThreadFence] = []

    def present(self) -> Fence:
        return Fence(Lane.COMPUTE, next(self._orders))

    def issue(
        self, lane: Lane, after: Iterable[Fence], work: Callable[[*Ts], None], *args: *Ts
    ) -> Fence:
        before = list(after)
        with self._lock:
            fence = ThreadFence(lane, next(self._orders), threading.Event())
            self.issued.append(fence)

            def late() -> None:
                for earlier in before:
                    earlier.synchronize()
                self.held[lane].wait(30)
                time.sleep(self.delays[lane])
                work(*args)
                fence.event.set()

            self._pools[lane].submit(late)
        return fence

    def wait(self, fence: Fence, home: Fence) -> None:
        fence.synchronize()

    def release_to(self, fence: Fence, home: Fence) -> None:
        fence.synchronize()

    def drain(self) -> None:
        for fence in list(self.issued):
            fence.synchronize()

    def hold(self, seconds: float) -> None:
        pass

    def tick(self) -> object:
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> float:
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start

    def shut(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


class SlowCudaLanes(CudaLanes):
    """CUDA streams on which every copy begins late."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        super().__init__(device)
        self.cycles = int(seconds * CYCLES_PER_SECOND)

    def enqueue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        torch.cuda._sleep(self.cycles)  # type: ignore[no-untyped-call]
        super().enqueue(target, source)


class PoisonedArena(HostArena):
    """Host memory that is overwritten as soon as nothing may read it any more."""

    def free(self, block: Block, fences: Iterable[Fence] = ()) -> None:
        fences = tuple(fences)
        for fence in (*block.fences, *fences):
            fence.synchronize()
        block.tensor.fill_(POISON)
        super().free(block, fences)


class PoisonedDisk(DiskStore):
    """Extents that are overwritten when they are freed."""

    def free(self, extent: Extent) -> None:
        for ticket in (extent.written, *extent.reads):
            if ticket is not None:
                ticket.settle()
        if not (extent.freed or self._closed):
            for part in extent.ranges:
                self._file.write(part.start, np.full(part.nbytes, POISON, np.uint8))
        super().free(extent)


class CarrierUnderTest(Carrier):
    """A carrier with other stores; ``files`` None is the real disk."""

    def __init__(
        self,
        device: torch.device | str,
        *,
        files: Files | None = None,
        poisoned: bool = False,
        lanes: Lanes | None = None,
        **budgets: Any,
    ) -> None:
        self._files = files
        self._poisoned = poisoned
        super().__init__(device, lanes=lanes, **budgets)

    def close(self) -> None:
        try:
            super().close()
        finally:
            if isinstance(self._lanes, ThreadLanes):  # whose threads later tests would find
                self._lanes.shut()

    def make_arena(self, budget_bytes: int | None) -> HostArena:
        kind = PoisonedArena if self._poisoned else HostArena
        return kind(budget_bytes, pin=self.device.type == "cuda")

    def make_disk(self) -> DiskStore:
        kind = PoisonedDisk if self._poisoned else DiskStore
        return kind(self._spill_dir, self._disk_budget, files=self._files)


def delayed_carrier(
    device: torch.device | str, seconds: float = 0.01, **budgets: Any
) -> CarrierUnderTest:
    """Make a carrier whose every copy, read and write begins ``seconds`` late."""
    device = resolve(device)
    lanes: Lanes
    lanes = SlowCudaLanes(device, seconds) if device.type == "cuda" else CpuLanes(device)
    return CarrierUnderTest(device, files=SlowFiles(seconds), lanes=lanes, **budgets)


def poisoned_carrier(device: torch.device | str, **budgets: Any) -> CarrierUnderTest:
    """Make a carrier that fills freed host memory and freed extents with 0xFF."""
    return CarrierUnderTest(device, poisoned=True, **budgets)


def random_bytes(nbytes: int, device: torch.device | str = "cpu", seed: int = 0) -> torch.Tensor:
    """Make ``nbytes`` bytes that are different for every seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator).to(device)
