"""Traces and machines small enough to work out by hand: ops in whole seconds, 1 byte per second."""

from __future__ import annotations

from collections.abc import Sequence

from belady.ir.hardware import Allocator, Capacity, HardwareProfile, Link
from belady.ir.plan import Assignment, Budget, Decision, Plan
from belady.ir.trace import (
    Algorithm,
    Mode,
    Op,
    Phase,
    Save,
    Source,
    Storage,
    StorageKind,
    Tier,
    Trace,
    Value,
)


def trace_of(
    device_s: Sequence[float],
    values: Sequence[tuple[int, int, int]] = (),
    *,
    host_s: float = 0.0,
    device: str = "cuda",
) -> Trace:
    """Ops of these seconds; values as ``(bytes, saved after op, read by op)``."""
    ops = tuple(
        Op(
            name=f"op{index}",
            module="",
            phase=Phase.FORWARD,
            pass_index=0,
            mode=Mode.NORMAL,
            device_seconds=seconds,
            host_seconds=host_s,
            workspace_bytes=0,
            reads=(),
            writes=(),
            algorithms=(Algorithm("slow", 5 * seconds, 0),),
        )
        for index, seconds in enumerate(device_s)
    )
    storages = tuple(
        Storage(device, nbytes, StorageKind.ACTIVATION, producer, producer + 1, read + 1)
        for nbytes, producer, read in values
    )
    return Trace(
        source=Source.GRAPH,
        device=device,
        roots=("Net",),
        ops=ops,
        storages=storages,
        values=tuple(
            Value(index, 0, producer, (), (_save(index, producer, read),))
            for index, (_, producer, read) in enumerate(values)
        ),
    )


def _save(ordinal: int, producer: int, read: int) -> Save:
    return Save(
        pass_index=0,
        ordinal=ordinal,
        op=producer,
        packed=producer + 1,
        reads=(read,),
        dropped=read + 1,
        as_input=False,
        module="",
        shape=(),
        stride=(),
        offset=0,
        dtype="torch.uint8",
    )


def link(source: Tier, target: Tier, *, path: str, duplex: float = 1.0) -> Link:
    """One byte per second alone, ``duplex`` while the other direction is busy."""
    return Link(source, target, ((1, 1.0),), duplex, 0.0, path)


def machine(*links: Link, host: bool = True) -> HardwareProfile:
    """Machine with these links, and pinned memory if ``host``."""
    tiers = [Tier.DEVICE, Tier.DISK, *([Tier.HOST] if host else [])]
    return HardwareProfile(
        name="by hand",
        device="cuda" if host else "cpu",
        capacities=tuple(Capacity(tier, 1 << 30) for tier in tiers),
        links=links,
        allocator=Allocator(1, 0.0, 0),
    )


def gpu(duplex: float = 1.0) -> HardwareProfile:
    """DEVICE, HOST and DISK, each pair of links with a path of its own."""
    return machine(
        link(Tier.DEVICE, Tier.HOST, path="pcie", duplex=duplex),
        link(Tier.HOST, Tier.DEVICE, path="pcie", duplex=duplex),
        link(Tier.HOST, Tier.DISK, path="disk"),
        link(Tier.DISK, Tier.HOST, path="disk"),
    )


def cpu() -> HardwareProfile:
    """DEVICE and DISK alone."""
    return machine(
        link(Tier.DEVICE, Tier.DISK, path="disk"),
        link(Tier.DISK, Tier.DEVICE, path="disk"),
        host=False,
    )


def plan_of(trace: Trace, *decisions: Decision, budget: int = 1 << 40) -> Plan:
    """Plan with one decision for each value, in order."""
    assigned = tuple(Assignment(index, decision) for index, decision in enumerate(decisions))
    return Plan(trace.fingerprint, "by hand", Budget(budget), assigned)
