"""Traces of which only storages, saves and anchors matter."""

from __future__ import annotations

import random
from dataclasses import replace

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Assignment, Budget, Decision, Managed, Offload, Plan, Recompute
from belady.ir.replay import refusals
from belady.ir.trace import Mode, Op, Phase, Save, Source, Storage, StorageKind, Tier, Trace, Value
from tests.support.strategies import machine

BYTES = Allocator(1, 0.0, 0)
GPU = machine("cuda", link_rate=1e10, disk=True, disk_rate=1e9, allocator=BYTES)
CPU = machine("cpu", link_rate=1e10, disk=True, disk_rate=1e9, allocator=BYTES)
ROOMY = Budget(1 << 60)


def op(index: int) -> Op:
    return Op(f"op{index}", "layer", Phase.FORWARD, 0, Mode.NORMAL, 1e-3, 1e-6, 0, (), ())


def save(packed: int, reads: tuple[int, ...], dropped: int, ordinal: int = 0) -> Save:
    return Save(0, ordinal, packed, packed, reads, dropped, True, "layer", (1,), (1,), 0, "float32")


def transient(nbytes: int, birth: int, released: int, death: int) -> Storage:
    return Storage("cuda:0", nbytes, StorageKind.ACTIVATION, birth, released, death)


def trace_of(
    ops: int, storages: list[Storage], values: list[Value], *, graph: bool = False
) -> Trace:
    saves = [save for value in values for save in value.saves]
    anchors = {b for save in saves for b in (save.packed, *save.reads[:1])}
    return Trace(
        Source.GRAPH if graph else Source.EAGER,
        "cuda",
        ("Net",),
        tuple(op(index) for index in range(ops)),
        tuple(storages),
        tuple(values),
        () if graph else tuple(sorted(anchors)),
    )


def plan_of(trace: Trace, decisions: dict[int, Decision]) -> Plan:
    assignments = tuple(Assignment(value, decision) for value, decision in decisions.items())
    return Plan(trace.fingerprint, "by hand", ROOMY, assignments)


def drawn(rng: random.Random, ops: int = 12) -> Trace:
    """Anything goes: values that share a storage, saved several times, never read, let go early."""
    storages: list[Storage] = []
    values: list[Value] = []
    count = 0
    for index in range(rng.randrange(1, 5)):
        birth = rng.randrange(ops)
        needed, death = birth, 0
        for version in range(rng.choice((1, 1, 1, 2))):
            saves = []
            for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
                packed = rng.randrange(birth, ops)
                asked = rng.choice((0, 1, 1, 1, 2))
                reads = sorted(rng.randrange(packed, ops) for _ in range(asked))
                dropped = rng.randrange(max([packed, *(read + 1 for read in reads)]), ops + 1)
                saves.append(save(packed, tuple(reads), dropped, count))
                count += 1
                # Whoever saves a tensor holds it.
                needed, death = max(needed, packed), max(death, dropped)
            values.append(Value(index, version, birth, (), tuple(saves)))
        released = rng.randrange(needed, ops + 1)
        nbytes = rng.randrange(1, 100)
        storages.append(transient(nbytes, birth, released, max(released, death)))
    return trace_of(ops, storages, values, graph=rng.random() < 0.2)


def drawn_moves(rng: random.Random, trace: Trace) -> dict[int, Decision]:
    """Offloads that keep the order of their boundaries, of any share of what is saved."""
    share = rng.random()
    moves: dict[int, Decision] = {}
    for index in trace.saved:
        if rng.random() < share:
            value = trace.values[index]
            last = value.dropped if value.first_read is None else value.first_read
            out, free, back, ready = sorted(rng.randint(value.first_save, last) for _ in range(4))
            if rng.random() < 0.5:
                back = ready = last
            moves[index] = Offload(rng.choice((Tier.HOST, Tier.DISK)), out - 1, free, back, ready)
    return moves


def drawn_managed(rng: random.Random, trace: Trace) -> dict[int, Decision]:
    """The same moves in managed memory, some of them left to the driver."""
    found: dict[int, Decision] = {}
    for index, move in drawn_moves(rng, trace).items():
        assert isinstance(move, Offload)
        out, gone = move.copy_out_after + 1, move.free_at
        back, faults = move.copy_in_at, rng.random() < 0.5
        if rng.random() < 0.5:
            gone = out
        if faults:
            back = move.ready_by
        found[index] = Managed(out, gone, back, move.ready_by, faults)
    return found


def drawn_drops(rng: random.Random, trace: Trace) -> dict[int, Decision]:
    """Values of which bytes and times allow that they are recomputed, by whatever ops."""
    share = rng.random()
    drops: dict[int, Decision] = {}
    for index in trace.saved:
        at = trace.values[index].first_read
        if at is not None and rng.random() < share and not any(refusals(trace, index, at)):
            drops[index] = Recompute((), at)
    return drops


def without_link(hardware: HardwareProfile, source: Tier, target: Tier) -> HardwareProfile:
    links = tuple(x for x in hardware.links if (x.source, x.target) != (source, target))
    return replace(hardware, links=links)
