"""A plan as tables: what each save is, and what is due at each boundary."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from belady.ir.plan import Encode, Offload, Plan, Recompute
from belady.ir.residency import offload_boundaries
from belady.ir.trace import Save, Trace


class Entry(NamedTuple):
    """What the plan expects of one save; ``last`` of those at its boundary, or not."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    boundary: int
    last: bool
    read: int
    value: int
    decision: Offload | Encode | Recompute | None


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
        tensor.shape == entry.shape
        and tensor.dtype is entry.dtype
        and tensor.layout is torch.strided
        and tensor.stride() == entry.stride
        and tensor.storage_offset() == entry.offset
    )


def _entry(save: Save, last: bool, value: int, decision: Any) -> Entry:
    return Entry(
        save.shape,
        save.stride,
        save.offset,
        getattr(torch, save.dtype),
        save.packed,
        last,
        min(save.reads, default=-1),
        value,
        decision,
    )


def tables(trace: Trace, plan: Plan) -> list[dict[int, Entry]]:
    """What is expected of every save: one table a pass, by ordinal."""
    found: list[dict[int, Entry]] = [{} for _ in trace.roots]
    decisions = plan.decisions
    last: dict[int, tuple[int, int]] = {}
    for value in trace.values:
        for save in value.saves:
            name = (save.pass_index, save.ordinal)
            last[save.packed] = max(last.get(save.packed, name), name)
    for index, value in enumerate(trace.values):
        for save in value.saves:
            is_last = last[save.packed] == (save.pass_index, save.ordinal)
            entry = _entry(save, is_last, index, decisions.get(index))
            found[save.pass_index][save.ordinal] = entry
    return found


def actions(trace: Trace, plan: Plan) -> list[Action]:
    """What is to be done, in order."""
    found = []
    for order, (value, decision) in enumerate(plan.decisions.items()):
        if isinstance(decision, Offload):
            out, free, back = offload_boundaries(trace, decision)
            found += [
                Action(out, OUT, order, value),
                Action(free, FREE, order, value),
                Action(back, IN, order, value),
            ]
        elif isinstance(decision, Recompute) and decision.at != trace.values[value].first_read:
            found.append(Action(decision.at, AGAIN, decision.ops[-1], value))
    return sorted(found)
