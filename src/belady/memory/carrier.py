"""Carries bytes between a device, host memory and disk."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping

import torch

from belady.ir.timeline import Lane, Moved
from belady.ir.trace import Tier
from belady.memory.disk import DiskStore
from belady.memory.fixed import FixedCarrier
from belady.memory.lanes import Lanes, lanes_for, resolve
from belady.memory.meter import Meter
from belady.memory.pace import Pace
from belady.memory.paging import Paging, cuda_pool
from belady.memory.parcels import Arrival, DirectParcel, HostParcel, Hub, Parcel
from belady.memory.slab import HostArena
from belady.memory.staging import StagedParcel, Staging, staging_bytes
from belady.memory.tape import Tape

__all__ = ["Arrival", "Carrier", "Parcel"]


class Carrier:
    """Sends bytes of one device to the tiers below it and brings them back. Thread-safe.

    Parameters
    ----------
    device
        A CPU or CUDA device.
    host_budget
        Most bytes of host memory to pin (CPU: to hold); None is no limit. Once anything of a
        CUDA device goes to disk, `staging_bytes` of it serve as staging.
    disk_budget
        Most bytes on disk; None is no limit but the disk's.
    spill_dir
        Folder on a disk for spilled bytes; None is the system's folder for temporary files.
    lanes
        Streams to use instead of those of the process.

    Attributes
    ----------
    paging
        Managed memory, which is none of the tiers that it sends to.
    iterations
        How many it has carried for, which monitors count: it outlives a change of engine.

    Raises
    ------
    ValueError
        If the device is neither a CPU nor a CUDA device.
    """

    def __init__(
        self,
        device: torch.device | str,
        *,
        host_budget: int | None = None,
        disk_budget: int | None = None,
        spill_dir: str | None = None,
        lanes: Lanes | None = None,
    ) -> None:
        self.device = resolve(device)
        self._lanes = lanes if lanes is not None else lanes_for(self.device)
        self._host_budget = host_budget
        self._disk_budget = disk_budget
        self._spill_dir = spill_dir
        # Host time is measured for free; timing a stream takes two events each time.
        self._meter = Meter(self._lanes, enabled=self._lanes.addressable)
        self._hub = Hub(self._lanes, self._meter)
        self._lock = threading.Lock()
        self._arena = self.make_arena(host_budget)
        self._disk: DiskStore | None = None
        self._staging: Staging | None = None
        self.paging = self.make_paging()
        self.iterations = 0

    def make_arena(self, budget_bytes: int | None) -> HostArena:
        """Make a store for host memory; tests override it."""
        return HostArena(budget_bytes, pin=self.device.type == "cuda")

    def make_disk(self) -> DiskStore:
        """Make the store for spilled bytes; tests override it."""
        return DiskStore(self._spill_dir, self._disk_budget)

    def make_paging(self) -> Paging:
        """Make what moves managed blocks; tests override it."""
        return Paging(self._hub, functools.partial(cuda_pool, self._lanes))

    def open_disk(self) -> None:
        """Make the disk tier ready now, so that an unusable folder is known at the start.

        Raises
        ------
        SpillError
            If the spill folder cannot be used.
        TierFullError
            If host memory has no room for staging.
        """
        with self._lock:
            self._open_disk()

    def reserve(self, host_bytes: int) -> None:
        """Pin at least ``host_bytes`` bytes of host memory now, while time is not counted.

        Raises
        ------
        TierFullError
            If the budget or the machine does not allow it.
        """
        self._hub.sweep()
        self._arena.reserve(host_bytes)

    def send(self, source: torch.Tensor, tier: Tier, label: int = -1) -> Parcel:
        """Start to copy ``source`` out, after what the current compute stream does so far.

        Parameters
        ----------
        source
            One-dimensional contiguous uint8 tensor on the device. It must not be written
            before `Parcel.wait_sent`; the parcel keeps it alive until then.
        tier
            HOST or DISK.
        label
            What records call the bytes.

        Raises
        ------
        ValueError
            If the source or the tier is not of that kind.
        TierFullError
            If the tier is full.
        SpillError
            If the spill folder cannot be used.
        TierError
            If the carrier is closed.
        """
        self._check(source)
        self._hub.sweep()
        if tier is Tier.HOST:
            return HostParcel(self._hub, self._arena, source, label)
        if tier is not Tier.DISK:
            raise ValueError(f"a carrier sends to host or disk, not to {tier}")
        with self._lock:
            disk, staging = self._open_disk()
        if staging is None:
            return DirectParcel(self._hub, disk, source, label)
        return StagedParcel(self._hub, staging, source, label)

    def fixed(self, sizes: Mapping[int, int]) -> FixedCarrier:
        """What carries values of these bytes, by label, to places that are theirs while it lives.

        Raises
        ------
        TierFullError
            If host memory has no room for all of them.
        """
        self._hub.sweep()
        return FixedCarrier.of(self._lanes, self._arena, sizes, self._hub)

    def sweep(self) -> None:
        """Give back what was released or dropped, now; every call that takes room does it.

        Worth calling where an iteration ends: a parcel released before `Parcel.wait_sent`
        keeps its source alive until then.
        """
        self._hub.sweep()
        self.paging.sweep()

    @property
    def counters(self) -> dict[Lane, Moved]:
        """Bytes and copies by lane since the start or `reset_counters`."""
        return self._meter.moved()

    @property
    def stalls(self) -> dict[Lane, float]:
        """Seconds that computation waited, by lane; see `collect_stalls`."""
        return self.collect_stalls()

    @property
    def measure_stalls(self) -> bool:
        """Whether waits are timed; on from the start on a CPU, off on a CUDA device."""
        return self._meter.enabled

    @measure_stalls.setter
    def measure_stalls(self, enabled: bool) -> None:
        self._meter.enabled = enabled

    def collect_stalls(self) -> dict[Lane, float]:
        """Seconds that computation waited, by lane, since the start or `reset_counters`.

        On a CUDA device it blocks until the device has passed the last wait.
        """
        return self._meter.stalls()

    def waits(self) -> Callable[[], float]:
        """Gives the seconds that computation waited until now, as `collect_stalls` counts them.

        It is what is called that blocks until the device has passed the last wait.
        """
        return self._meter.waits()

    def record(self) -> Tape:
        """Take down every copy and wait from now on; waits for the device first."""
        self._lanes.timed = True
        self._meter.tape = tape = Tape(self._lanes)
        return tape

    def pace(self) -> Pace:
        """Take down every wait from now on, if `measure_stalls`, and what the caller adds."""
        self._meter.pace = pace = Pace(self._lanes)
        return pace

    def stop_recording(self) -> None:
        """Take nothing down from now on. Idempotent."""
        self._lanes.timed = False
        self._meter.tape = self._meter.pace = None

    def reset_counters(self) -> None:
        """Set counters and stalls to zero and peaks to what is held now."""
        self._hub.sweep()
        self._meter.reset()
        self._arena.reset_peak()
        self.paging.reset_peaks()
        if self._disk is not None:
            self._disk.reset_peak()

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold parcels now, plus those set aside for staging.

        Those of managed blocks, on the device or not, are among them.
        """
        self.sweep()
        return self._arena.used_bytes + self.paging.parked_bytes

    @property
    def peak_host_bytes(self) -> int:
        """Most bytes of host memory held, counted as `host_bytes`."""
        self.sweep()
        return self._arena.peak_bytes + self.paging.peak_parked_bytes

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory taken from the system now, used or not."""
        return self._arena.slab_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk now."""
        self._hub.sweep()
        return self._disk.used_bytes if self._disk is not None else 0

    @property
    def peak_disk_bytes(self) -> int:
        """Most bytes on disk."""
        return self._disk.peak_bytes if self._disk is not None else 0

    def close(self) -> None:
        """Wait for copies in flight and give everything back. Idempotent.

        What parcels still hold is lost; releasing them afterwards is harmless.
        """
        self._hub.closed = True
        self._hub.sweep()
        if self._staging is not None:
            self._staging.close()
        if self._disk is not None:
            self._disk.close()
        self._lanes.drain()
        self.paging.close()
        self._arena.close()

    def _open_disk(self) -> tuple[DiskStore, Staging | None]:
        if self._disk is None:
            self._disk = self.make_disk()
        if self._staging is None and not self._lanes.addressable:
            nbytes = staging_bytes(self._host_budget)
            self._staging = Staging(self._hub, self._disk, self._arena, nbytes)
        return self._disk, self._staging

    def _check(self, source: torch.Tensor) -> None:
        self._hub.check_open()
        if source.dtype != torch.uint8 or source.dim() != 1 or not source.is_contiguous():
            raise ValueError(
                f"a carrier sends one-dimensional contiguous bytes, not {source.dtype} of shape "
                f"{tuple(source.shape)}"
            )
        if source.device != self.device:
            raise ValueError(f"a carrier of {self.device} cannot send bytes of {source.device}")
