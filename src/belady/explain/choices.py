"""Other decisions for some values of a plan, each as legal as it can be made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple

from belady.errors import TierError
from belady.explain.stays import sharing
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Decision, Encode, Keep, Offload, Plan, Recompute
from belady.ir.replay import irreproducible, refusals, sources
from belady.ir.residency import away
from belady.ir.trace import Tier, Trace
from belady.planners.due import schedule
from belady.planners.moves import Case, Schedule, encodings, movable, offloads
from belady.planners.replays import LONGEST, cheapest
from belady.planners.spread import Spread, Times, slack_of
from belady.simulate.routes import routes


class Need(NamedTuple):
    """A replay that starts from a value: of which value, and at which boundary."""

    value: int
    at: int


def changed(plan: Plan, changes: Mapping[int, Decision]) -> Plan:
    """The plan with other decisions for some values; those without a decision come last."""
    left = dict(changes)
    assignments = [
        replace(it, decision=left.pop(it.value)) if it.value in left else it
        for it in plan.assignments
    ]
    assignments += [Assignment(value, decision) for value, decision in left.items()]
    return replace(plan, assignments=tuple(assignments))


def together(trace: Trace, plan: Plan, values: Iterable[int]) -> tuple[int, ...]:
    """What is decided with ``values``: all that shares bytes with those that may move or do.

    Planners move the values of one storage together or not at all, since moving a part of them
    frees nothing.
    """
    free = set(movable(trace))
    asked = {value for value in values if trace.values[value].saves}
    group = {other for value in asked for other in sharing(trace, value)}
    return tuple(sorted(v for v in group if v in free or v in plan.decisions))


def tiers(hardware: HardwareProfile) -> Iterator[Tier]:
    """Tiers of the machine that a value can go to and come back from."""
    for tier in (Tier.HOST, Tier.DISK):
        if hardware.capacity(tier) > 0:
            try:
                routes(hardware, tier)
            except TierError:
                continue
            yield tier


def keep(values: Iterable[int]) -> dict[int, Decision]:
    """All of them kept."""
    return {value: Keep() for value in values}


def needs(trace: Trace, plan: Plan, values: Iterable[int]) -> dict[int, Need]:
    """The first replay of another value that starts from each of ``values``, where there is one."""
    group, found = set(values), dict[int, Need]()
    for value, decision in plan.decisions.items():
        if isinstance(decision, Recompute) and value not in group:
            for source in group.intersection(sources(trace, decision)):
                need = Need(value, decision.at)
                found[source] = min(need, found.get(source, need), key=lambda it: it.at)
    return found


def offloaded(case: Case, plan: Plan, values: tuple[int, ...], tier: Tier) -> dict[int, Decision]:
    """All that can leave, as at the floor: gone as soon and back as late as may be."""
    due = needs(case.trace, plan, values)
    schedules = {value: _as_late_as_can_be(case.trace, value, due.get(value)) for value in values}
    return dict(offloads(case.trace, dict.fromkeys(values, tier), schedules))


def spread(
    case: Case, plan: Plan, floor: Mapping[int, Decision], times: Times
) -> dict[int, Decision]:
    """The same copies with as much time as the memory that is left over gives them.

    Parameters
    ----------
    floor
        What `offloaded` gives.
    times
        Seconds at which compute is expected to reach each boundary.
    """
    moves = {value: it for value, it in floor.items() if isinstance(it, Offload)}
    slack = slack_of(case, changed(plan, floor))
    wider = Spread(case, moves, times, slack)
    wider.widen()
    # What could stay all the way is kept by another choice.
    return {**moves, **wider.moves}


def recomputed(trace: Trace, plan: Plan, values: tuple[int, ...]) -> dict[int, Decision]:
    """All that a replay may bring back beside the other decisions of the plan."""
    busy = needs(trace, plan, values)
    found: dict[int, Decision] = {}
    # A replay starts from what was produced before, of which is known by then whether it is there.
    for value in sorted(values, key=lambda v: (trace.values[v].producer, v)):
        replay = _replay(trace, plan, value, found) if value not in busy else None
        if replay is not None:
            found[value] = replay
    return found


def encoded(case: Case, values: tuple[int, ...]) -> dict[int, Encode]:
    """All of them in the fewest bytes with which backward can do; none if not all can be."""
    found = encodings(case, values)
    return found if len(found) == len(values) else {}


def why_no_replay(trace: Trace, plan: Plan, index: int) -> str:
    """Say why `recomputed` has nothing for value ``index``."""
    value = trace.values[index]
    need = needs(trace, plan, (index,)).get(index)
    if need is not None:
        return f"value {need.value} is recomputed from it"
    if value.first_read is None:
        return "backward never reads it, so there is no moment to recompute it"
    for message, _ in refusals(trace, index, value.first_read):
        return message
    if value.producer < 0:
        return "it was there before the iteration, so no op makes it"
    why = irreproducible(trace, value.producer)
    if why:
        return f"{trace.locate(value.producer)} makes it and {why}"
    return f"it would take more than {LONGEST} ops, or one that cannot be run again"


def _as_late_as_can_be(trace: Trace, index: int, need: Need | None) -> Schedule:
    found = schedule(trace, index, None if need is None else need.at)
    return found._replace(ready_by=found.copy_in_at)


def _replay(
    trace: Trace, plan: Plan, index: int, others: Mapping[int, Decision]
) -> Recompute | None:
    at = trace.values[index].first_read
    if at is None:
        return None
    decisions = {**plan.decisions, **others}
    return cheapest(trace, index, lambda source: _there(trace, source, at, decisions.get(source)))


def _there(trace: Trace, source: int, at: int, decision: Decision | None) -> bool:
    """Whether the bytes of a saved value are on the device at boundary ``at``."""
    if isinstance(decision, Offload):
        reads = (read for save in trace.values[source].saves for read in save.reads)
        return away(trace, source, decision)[1] <= at <= max(reads, default=-1)
    if isinstance(decision, Encode):
        return decision.decode_at <= at
    return decision is None or isinstance(decision, Keep)
