"""A plan as tables: what each save is, and what is due at each boundary."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

import torch

from belady.ir.plan import Decision, Managed, Offload, Plan, Recompute
from belady.ir.replay import sources
from belady.ir.residency import offload_boundaries
from belady.ir.trace import Tier, Trace
from belady.memory.geometry import Geometry


class Entry(NamedTuple):
    """What the plan expects of one save.

    Attributes
    ----------
    boundary
        Where it happens.
    due
        Up to which boundary actions are due once it has happened: what is due at a boundary waits
        for all that is saved there.
    read
        Boundary of the first read, or -1.
    plain
        Whether it is kept and no replay starts from it.
    geometry
        All of it, for a tensor that is neither conjugate nor negative.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    boundary: int
    due: int
    read: int
    value: int
    decision: Decision | None
    plain: bool
    geometry: Geometry


class Action(NamedTuple):
    """One thing to do to one value; sorts by boundary, step (frees before takes), order.

    The order is that of the plan, and of the ops for replays, which may start from one another.
    """

    boundary: int
    step: int
    order: int
    value: int


OUT, FREE, IN, AGAIN = range(4)


def matches(tensor: torch.Tensor, entry: Entry) -> bool:
    """Whether the save is the one that the plan expects."""
    return (
        not tensor.is_nested
        and tensor.shape == entry.shape
        and tensor.dtype is entry.dtype
        and tensor.layout is torch.strided
        and tensor.stride() == entry.stride
        and tensor.storage_offset() == entry.offset
    )


def tables(trace: Trace, plan: Plan, started: Container[int]) -> list[list[Entry | None]]:
    """What is expected of every save: one table a pass, by ordinal.

    ``started`` are the values that replays start from.
    """
    saves = [(save, value) for value, of in enumerate(trace.values) for save in of.saves]
    last: dict[int, tuple[int, int]] = {}
    for save, _ in saves:
        name = (save.pass_index, save.ordinal)
        last[save.packed] = max(last.get(save.packed, name), name)
    found: list[list[Entry | None]] = [[] for _ in trace.roots]
    for save, value in saves:
        table = found[save.pass_index]
        table += [None] * (save.ordinal + 1 - len(table))
        dtype, shape = getattr(torch, save.dtype), torch.Size(save.shape)
        table[save.ordinal] = Entry(
            save.shape,
            save.stride,
            save.offset,
            dtype,
            save.packed,
            save.packed - (last[save.packed] != (save.pass_index, save.ordinal)),
            min(save.reads, default=-1),
            value,
            decision := plan.decisions.get(value),
            decision is None and value not in started,
            Geometry(dtype, shape, save.stride, save.offset, conj=False, neg=False),
        )
    return found


def tiers(plan: Plan) -> dict[int, Tier]:
    """Where each value that leaves the device goes."""
    leaving = ((v, d) for v, d in plan.decisions.items() if isinstance(d, (Offload, Managed)))
    return {v: d.tier if isinstance(d, Offload) else Tier.HOST for v, d in leaving}


def reads(trace: Trace, plan: Plan) -> dict[int, int]:
    """How often each value that the plan decides on is read.

    A save that outlives the iteration unread counts once, as a later one may read it: a
    generator's, say, whose output goes backward after the discriminator's step. Bytes let go before
    that would be brought back for each save, and lie there twice for two saves of one op.
    """
    end = len(trace.ops)
    return {
        v: sum(len(save.reads) or save.dropped >= end for save in trace.values[v].saves)
        for v in plan.decisions
    }


def actions(trace: Trace, plan: Plan) -> list[Action]:
    """What is to be done, in order."""
    found, together = [], _together(trace, plan)
    for order, (value, decision) in enumerate(plan.decisions.items()):
        if isinstance(decision, (Offload, Managed)):
            move = decision if isinstance(decision, Offload) else decision.moves
            out, free, back = offload_boundaries(trace, move)
            found += [
                Action(out, OUT, order, value),
                Action(free, FREE, order, value),
                Action(back, IN, order, value),
            ]
        elif isinstance(decision, Recompute) and (
            value in together or decision.at != trace.values[value].first_read
        ):
            found.append(Action(decision.at, AGAIN, decision.ops[-1], value))
    return sorted(found)


def _together(trace: Trace, plan: Plan) -> set[int]:
    """Values made again at one boundary, one of them from another.

    Left to their readers, the one that is read first might be let go before the other one starts
    from it, or be made while that one holds what it needs meanwhile.
    """
    found = set[int]()
    at = {value: it.at for value, it in plan.decisions.items() if isinstance(it, Recompute)}
    for value, decision in plan.decisions.items():
        if isinstance(decision, Recompute):
            of = {it for it in sources(trace, decision) if at.get(it) == decision.at}
            found |= of | ({value} if of else set())
    return found
