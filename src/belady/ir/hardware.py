"""What the machine can do: tiers, links, allocator."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from belady.ir.trace import Tier


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes that a tier can hold for us."""

    tier: Tier
    nbytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two tiers.

    Attributes
    ----------
    curve
        Measured ``(bytes of a copy, bytes per second)`` with the other direction idle, ascending
        in bytes.
    duplex_bytes_per_s
        Rate of a large copy while the other direction is busy too.
    latency_s
        Time that a copy of a few bytes takes, in seconds.
    path
        Name of the physical path; links with one name share it.
    issue_s
        Seconds of the host that issuing one copy takes, whatever its size; of the link of the
        device to itself, one pass over bytes. What an engine does around it is not in it.
    """

    source: Tier
    target: Tier
    curve: tuple[tuple[int, float], ...]
    duplex_bytes_per_s: float
    latency_s: float
    path: str
    issue_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Rate of a large copy alone."""
        return max(rate for _, rate in self.curve)

    def seconds(self, nbytes: int) -> float:
        """Duration of one copy of ``nbytes`` bytes alone, interpolated on the curve.

        Between two points time grows linearly with bytes; outside it follows the nearest rate.
        """
        if nbytes <= 0:
            return 0.0
        first_bytes, first_rate = self.curve[0]
        if nbytes <= first_bytes:
            return max(self.latency_s, nbytes / first_rate)
        for (low, slow), (high, fast) in pairwise(self.curve):
            if nbytes <= high:
                start, end = low / slow, high / fast
                return start + (end - start) * (nbytes - low) / (high - low)
        return nbytes / self.curve[-1][1]


@dataclass(frozen=True, slots=True)
class ManagedLinks:
    """How pages of managed memory move between the device and host memory.

    Attributes
    ----------
    out, back
        By explicit prefetch.
    fault
        Back, page by page, while an op reads them.
    """

    out: Link
    back: Link
    fault: Link


@dataclass(frozen=True, slots=True)
class Allocator:
    """How the device allocator turns asked bytes into held bytes.

    A peak of ``p`` bytes held needs a budget of ``p * (1 + margin_fraction) + margin_bytes``:
    the stated margin for what issue order alone does not show (fragmentation, idle blocks).

    Attributes
    ----------
    settled_bytes
        Part of every peak that was there first and stays where it is (parameters and what an
        optimizer keeps): between these blocks nothing is lost, so the fraction is not on them.
    """

    round_bytes: int
    margin_fraction: float
    margin_bytes: int
    settled_bytes: int = 0

    def held(self, nbytes: int) -> int:
        """Bytes held for a request of ``nbytes``."""
        return -(-nbytes // self.round_bytes) * self.round_bytes

    def budget_for(self, peak_bytes: int) -> int:
        """Smallest budget in which a peak of ``peak_bytes`` is safe."""
        lost = self.margin_fraction * max(0, peak_bytes - self.settled_bytes)
        return int(peak_bytes + lost) + self.margin_bytes

    def peak_within(self, budget_bytes: int) -> int:
        """Largest peak that is safe in ``budget_bytes``; may be negative."""
        most = budget_bytes - self.margin_bytes
        spread = most + self.margin_fraction * self.settled_bytes
        peak = min(most, int(spread / (1 + self.margin_fraction)))
        while self.budget_for(peak) > budget_bytes:
            peak -= 1
        while self.budget_for(peak + 1) <= budget_bytes:
            peak += 1
        return peak

    def fraction_of(self, peak_bytes: int, budget_bytes: int) -> float:
        """The fraction under which a peak is just safe, without a margin in bytes."""
        moving = max(1, peak_bytes - self.settled_bytes)
        return (budget_bytes - peak_bytes) / moving


@dataclass(frozen=True)
class HardwareProfile:
    """One machine as measured.

    Attributes
    ----------
    outside_bytes
        Device bytes in use outside torch's allocator (context, libraries, other processes).
    settings
        Allocator and library settings under which it was measured, as ``(name, value)``.
    managed
        Managed memory, which CUDA alone has; None where the probe found none, or was not asked.
    hook_s
        Seconds of the host for a value that a plan does not keep, beside what it takes to issue
        anything: hooks are on for all else that its call saves. What iterations show; 0 before.
    joins
        Whether compute waits for all copies at the end of forward, as where that is one launch:
        it ends with all that was issued in it.
    """

    name: str
    device: str
    capacities: tuple[Capacity, ...]
    links: tuple[Link, ...]
    allocator: Allocator
    outside_bytes: int = 0
    settings: tuple[tuple[str, str], ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    managed: ManagedLinks | None = None
    hook_s: float = 0.0
    joins: bool = False
    version: int = field(default=1, metadata={"const": 1})

    def capacity(self, tier: Tier) -> int:
        """Bytes that ``tier`` can hold; 0 for a tier that is absent."""
        return next((c.nbytes for c in self.capacities if c.tier is tier), 0)

    def stops(self, tier: Tier) -> tuple[Tier, ...]:
        """Tiers that a value passes on its way from the device to ``tier``.

        On the way to disk it is staged in pinned memory where the machine has that.
        """
        if tier is Tier.DISK and self.capacity(Tier.HOST) > 0:
            return Tier.DEVICE, Tier.HOST, Tier.DISK
        return Tier.DEVICE, tier

    def link(self, source: Tier, target: Tier) -> Link | None:
        """The link from ``source`` to ``target``, or None when there is none."""
        return self._links_by_ends.get((source, target))

    @cached_property
    def _links_by_ends(self) -> dict[tuple[Tier, Tier], Link]:
        # Of two with the same ends the first.
        return {(link.source, link.target): link for link in reversed(self.links)}

    @property
    def no_managed(self) -> str:
        """Why nothing may move in managed memory where ``managed`` is None, as a clause."""
        if self.device == "cpu":
            return f"machine {self.name!r} is a CPU, and managed memory takes a CUDA device"
        return (
            f"the profile of machine {self.name!r} has no links of managed memory, which the probe "
            "measures on a CUDA device that may share it with the host (concurrentManagedAccess)"
        )

    def memory_seconds(self, nbytes: int) -> float:
        """Seconds in which the device reads or writes ``nbytes`` of its own; 0 where unknown."""
        link = self.link(Tier.DEVICE, Tier.DEVICE)
        return 0.0 if link is None else nbytes / link.bytes_per_s
