"""Streams and events of a device behind one small interface."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from itertools import count
from typing import TypeVarTuple

import torch

from belady.ir.timeline import Lane
from belady.memory.fences import CudaFence, Fence
from belady.memory.streams import of_thread

Ts = TypeVarTuple("Ts")

# Of a GPU, which are at most about as many.
_CYCLES_PER_S = 2e9
# Without the frames of torch.cuda.Event, each of which costs as much as what it calls.
_Event = torch._C._CudaEventBase


class Lanes(ABC):
    """What carries copies between a device and the host.

    Attributes
    ----------
    device
        The device, with its index.
    addressable
        Whether the operating system can read and write the memory of the device directly.
    timed
        Whether copies are bracketed by ticks, which takes two events for each.
    """

    addressable: bool

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Recording a fence and numbering it is one step: the autograd thread, the user's
        # thread and a disk worker share the copy streams.
        self._lock = threading.Lock()
        self._orders = count()
        self.timed = False

    @abstractmethod
    def present(self) -> Fence:
        """Mark the point that the current compute stream has reached."""

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, after: Iterable[Fence]
    ) -> Fence:
        """Issue a copy on ``lane`` (COPY_OUT or COPY_IN) that starts after ``after``.

        Both tensors are one-dimensional and must stay alive until the fence returned has passed, or
        until a stream that reuses their memory has been told to wait for it.
        """
        return self.issue(lane, after, self.enqueue, target, source)

    @abstractmethod
    def issue(
        self, lane: Lane, after: Iterable[Fence], work: Callable[[*Ts], None], *args: *Ts
    ) -> Fence:
        """Issue what ``work`` puts on the stream of ``lane``, to start after ``after``.

        That stream is the current one while it is called. The fence has ticks while lanes are
        timed.
        """

    def handle(self, lane: Lane) -> int:
        """What the driver calls the stream of ``lane``; 0 where there is none."""
        return 0

    def enqueue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Put one copy on the current stream; tests override it to make copies late."""
        target.copy_(source, non_blocking=True)

    @abstractmethod
    def wait(self, fence: Fence, home: Fence) -> None:
        """Make the current compute stream, and the stream of ``home``, wait for ``fence``.

        ``home`` is the compute fence taken where the device memory of the copy was allocated
        or produced: its stream may reuse that memory, even when another stream asks.
        """

    @abstractmethod
    def release_to(self, fence: Fence, home: Fence) -> None:
        """Make the stream of ``home`` alone wait for ``fence``."""

    @abstractmethod
    def drain(self) -> None:
        """Block the calling thread until both copy lanes are idle."""

    @abstractmethod
    def hold(self, seconds: float) -> None:
        """Let the device become idle, and its compute wait for so long; the host goes on."""

    @abstractmethod
    def tick(self) -> object:
        """Mark a moment of the current compute stream, to be passed to `seconds`."""

    @abstractmethod
    def seconds(self, start: object, end: object) -> float:
        """Seconds between two ticks; blocks until the later one has passed."""


class CpuLanes(Lanes):
    """Lanes of the CPU: a copy is finished when it has been issued."""

    addressable = True

    def present(self) -> Fence:
        """Mark a point that has passed."""
        return Fence(Lane.COMPUTE, next(self._orders))

    def issue(
        self, lane: Lane, after: Iterable[Fence], work: Callable[[*Ts], None], *args: *Ts
    ) -> Fence:
        """Do it now."""
        for fence in after:
            fence.synchronize()
        begun = self.tick()
        work(*args)
        return Fence(lane, next(self._orders), ticks=(begun, self.tick()))

    def wait(self, fence: Fence, home: Fence) -> None:
        """Let a fence of other lanes pass; one of these has."""
        fence.synchronize()

    def release_to(self, fence: Fence, home: Fence) -> None:
        """As `wait`."""
        fence.synchronize()

    def drain(self) -> None:
        """Nothing is ever in flight."""

    def hold(self, seconds: float) -> None:
        """Nothing goes on beside the host."""

    def tick(self) -> object:
        """Read the host's clock."""
        return time.perf_counter()

    def seconds(self, start: object, end: object) -> float:
        """Seconds between two readings."""
        if not isinstance(start, float) or not isinstance(end, float):
            raise TypeError("ticks of other lanes")
        return end - start


class CudaLanes(Lanes):
    """Lanes of a CUDA device: one copy-out and one copy-in stream."""

    addressable = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._index: int = device.index
        self._streams = {
            Lane.COPY_OUT: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
            Lane.COPY_IN: torch.cuda.Stream(device),  # type: ignore[no-untyped-call]
        }

    def present(self) -> CudaFence:
        """Record an event on the current stream of the calling thread."""
        # Never cached: the user may switch streams between two calls.
        return self._record(Lane.COMPUTE, of_thread(self._index))

    def issue(
        self, lane: Lane, after: Iterable[Fence], work: Callable[[*Ts], None], *args: *Ts
    ) -> Fence:
        """Put it on the stream of ``lane``."""
        stream = self._streams[lane]
        with self._lock:
            for fence in after:
                fence.hold(stream)
            # As a context it is its own; torch.cuda.stream asks for devices in Python each time.
            # It cannot be entered twice, which the lock prevents.
            with stream:
                begun = self.tick() if self.timed else None
                work(*args)
                ticks = None if begun is None else (begun, self.tick())
            return self._record(lane, stream, ticks)

    def handle(self, lane: Lane) -> int:
        """The stream's pointer."""
        return int(self._streams[lane].cuda_stream)

    def wait(self, fence: Fence, home: Fence) -> None:
        """Order one or two streams after the event."""
        assert isinstance(home, CudaFence)
        current = of_thread(self._index)
        fence.hold(current)
        if home.stream is not current:
            fence.hold(home.stream)

    def release_to(self, fence: Fence, home: Fence) -> None:
        """Order the stream of ``home`` after the event."""
        assert isinstance(home, CudaFence)
        fence.hold(home.stream)

    def drain(self) -> None:
        """Synchronize both streams."""
        for stream in self._streams.values():
            stream.synchronize()

    def hold(self, seconds: float) -> None:
        """Put a kernel on the current stream that only spins, once there is nothing else."""
        torch.cuda.synchronize(self._index)
        with torch.cuda.device(self._index):
            torch.cuda._sleep(int(seconds * _CYCLES_PER_S))  # type: ignore[no-untyped-call]

    def tick(self) -> object:
        """Record a timing event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(of_thread(self._index))
        return event

    def seconds(self, start: object, end: object) -> float:
        """Seconds between two timing events; blocks until the later one has happened."""
        if not isinstance(start, torch.cuda.Event) or not isinstance(end, torch.cuda.Event):
            raise TypeError("ticks of other lanes")
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _record(
        self, lane: Lane, stream: torch.cuda.Stream, ticks: tuple[object, object] | None = None
    ) -> CudaFence:
        event = _Event()
        event.record(stream)
        return CudaFence(lane, next(self._orders), event, stream, ticks=ticks)


_LANES: dict[torch.device, Lanes] = {}
_LANES_LOCK = threading.Lock()


def resolve(device: torch.device | str) -> torch.device:
    """Give ``device`` its index: ``cuda`` becomes the current CUDA device."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


def lanes_for(device: torch.device | str) -> Lanes:
    """Return the lanes of ``device``: the same ones for the life of the process.

    Raises
    ------
    ValueError
        If the device is neither a CPU nor a CUDA device.
    """
    device = resolve(device)
    with _LANES_LOCK:
        lanes = _LANES.get(device)
        if lanes is None:
            lanes = _LANES[device] = _make_lanes(device)
        return lanes


def _make_lanes(device: torch.device) -> Lanes:
    if device.type == "cpu":
        return CpuLanes(device)
    if device.type == "cuda":
        return CudaLanes(device)
    raise ValueError(f"no lanes for device {str(device)!r}: only cpu and cuda are supported")
