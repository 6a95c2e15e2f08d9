"""Which replays to do without where a mix needs more memory than there is."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from belady.ir.plan import Recompute
from belady.ir.replay import sources
from belady.ir.scratch import replay_bytes
from belady.planners.moves import Case, read_by
from belady.planners.spread import Bytes, held_bytes


def worst(slack: Bytes) -> list[int]:
    """The op that lacks most in each stretch of ops that lack bytes."""
    short = np.flatnonzero(slack < 0)
    stretches = np.split(short, np.flatnonzero(np.diff(short) > 1) + 1)
    return [int(ops[np.argmin(slack[ops])]) for ops in stretches if len(ops)]


def heavy(
    case: Case, replays: Mapping[int, Recompute], gone: Collection[int], at: int, lacking: int
) -> set[int]:
    """Values whose replays take most bytes during an op, enough of them to give back ``lacking``.

    While one runs these are what it makes beside its value. Before and after, those of its
    sources that were ``gone`` and are back before backward itself reads them. Empty if none takes
    any.
    """
    trace, taken = case.trace, dict[int, int]()
    for value, replay in replays.items():
        if replay.at > at:
            continue
        early = (it for it in sources(trace, replay) if it in gone)
        taken[value] = sum(held_bytes(case, it) for it in early if at < read_by(trace.values[it]))
        if replay.at == at:
            taken[value] += replay_bytes(trace, value, replay, case.hardware.allocator)
    found = set[int]()
    for value in sorted(taken, key=lambda value: (-taken[value], -value)):
        if lacking <= 0 or taken[value] <= 0:
            break
        found.add(value)
        lacking -= taken[value]
    return found
