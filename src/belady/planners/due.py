"""When replays run and copies are back, where one starts from what another brings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from belady.ir.plan import Recompute
from belady.ir.replay import sources
from belady.ir.residency import saved_from
from belady.ir.trace import Trace
from belady.planners.moves import Schedule, read_by

_NONE: Mapping[int, int] = MappingProxyType({})


def timed(
    trace: Trace, replays: Mapping[int, Recompute], early: Mapping[int, int] = _NONE
) -> dict[int, Recompute]:
    """The replays, each at the first read or where another one that starts from it needs it.

    Parameters
    ----------
    early
        Boundaries by which values are made again in any case.
    """
    found: dict[int, Recompute] = {}
    due = dict(early)
    # A replay starts from what was produced before, so users come first here.
    for value in sorted(replays, key=lambda v: (-trace.values[v].producer, -v)):
        replay, at = replays[value], trace.values[value].first_read or 0
        at = min(at, due.get(value, at))
        found[value] = replay if replay.at == at else replace(replay, at=at)
        for source in sources(trace, replay):
            due[source] = min(at, due.get(source, at))
    return found


def due_by(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, int]:
    """Boundary at which the first replay that starts from a value needs it."""
    due: dict[int, int] = {}
    for replay in replays.values():
        for source in sources(trace, replay):
            due[source] = min(replay.at, due.get(source, replay.at))
    return due


def schedule(trace: Trace, index: int, due: int | None) -> Schedule:
    """Gone as soon as may be, and back for the first read or where a replay is ``due``."""
    value = trace.values[index]
    back = read_by(value)
    saved = saved_from(value, back)
    return Schedule(saved - 1, saved + 1, back if due is None else min(back, due), due)


def last_read(trace: Trace, index: int) -> int:
    """Boundary at which backward last takes the value back; -1 if it never does."""
    return max((read for save in trace.values[index].saves for read in save.reads), default=-1)
