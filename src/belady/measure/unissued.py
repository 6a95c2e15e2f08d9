"""An iteration that no host issues, since it was captured and is launched."""

from __future__ import annotations

from dataclasses import replace

from belady.ir.hardware import HardwareProfile
from belady.ir.trace import Trace


def unissued(trace: Trace) -> Trace:
    """The trace with no host in it."""
    return replace(trace, ops=tuple(replace(op, host_seconds=0.0) for op in trace.ops))


def launching(hardware: HardwareProfile, beside_bytes: int) -> HardwareProfile:
    """The machine on which copies and replays are issued for nothing.

    Parameters
    ----------
    beside_bytes
        What others need that may not lie where launches write: it is left of every budget.
    """
    allocator = hardware.allocator
    allocator = replace(allocator, margin_bytes=allocator.margin_bytes + beside_bytes)
    links = tuple(replace(link, issue_s=0.0) for link in hardware.links)
    return replace(hardware, allocator=allocator, links=links, hook_s=0.0)
