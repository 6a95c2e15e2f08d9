"""The lanes and links that copies take."""

from __future__ import annotations

from itertools import pairwise

from belady.errors import TierError
from belady.ir.hardware import HardwareProfile, Link
from belady.ir.plan import Decision, Managed, Offload
from belady.ir.timeline import Lane
from belady.ir.trace import Tier


def routes(hardware: HardwareProfile, tier: Tier) -> tuple[list[tuple[Lane, Link]], ...]:
    """Lanes and links that carry a value from the device to ``tier``, and back.

    On the way to disk it is staged in pinned memory where the machine has that.

    Raises
    ------
    TierError
        If the machine lacks a link of the route.
    """
    there = list(pairwise(hardware.stops(tier)))
    back = [(target, source) for source, target in reversed(there)]
    return [_hop(hardware, *ends) for ends in there], [_hop(hardware, *ends) for ends in back]


def ways(hardware: HardwareProfile, decision: Decision) -> tuple[list[tuple[Lane, Link]], ...]:
    """Lanes and links that carry a value out and back under an Offload or a Managed.

    Raises
    ------
    TierError
        If the machine lacks a link of the route, or its profile those of managed memory.
    """
    if not isinstance(decision, Managed):
        return routes(hardware, decision.tier if isinstance(decision, Offload) else Tier.DEVICE)
    links = hardware.managed
    if links is None:
        raise TierError(hardware.no_managed)
    back = links.fault if decision.faults else links.back
    return [(Lane.COPY_OUT, links.out)], [(Lane.COPY_IN, back)]


def _hop(hardware: HardwareProfile, source: Tier, target: Tier) -> tuple[Lane, Link]:
    link = hardware.link(source, target)
    if link is None:
        raise TierError(f"machine {hardware.name!r} has no link from {source} to {target}")
    if Tier.DISK in (source, target):
        return (Lane.DISK_WRITE if target is Tier.DISK else Lane.DISK_READ), link
    return (Lane.COPY_OUT if source is Tier.DEVICE else Lane.COPY_IN), link
