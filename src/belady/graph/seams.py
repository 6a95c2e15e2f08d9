"""Movements at the seams of fused kernels: where an op that no compiler fuses begins or ends.

A run of ops is compiled from one movement to the next. One in the middle of ops that would be one
kernel makes two of them, which write and read again what is between. So bytes go a few ops later
than planned, and come back a few ops earlier, as far as the budget has room for that.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

from torch import fx

from belady.graph.joint import Step
from belady.graph.layout import Layout
from belady.graph.ops import fusion_of, is_fused, is_random, name_of
from belady.graph.orders import Act
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Offload, Plan
from belady.ir.trace import Op, Phase, Trace
from belady.measure.corrections import faster
from belady.simulate.reassigned import reassigned

# Ops from one boundary at which the time is noted to the next, where nothing is due: fewer than a
# device can be held back for at once, see `belady.memory.pace`.
_TOLD = 100

# What an op takes in a fused kernel, of its seconds alone. ResNet-50 in bf16 on an H200 takes 54 ms
# with eager kernels and 37 with Inductor's, of which convolutions are the same.
_OF_FUSED = 0.5


def at_seams(trace: Trace, hardware: HardwareProfile, plan: Plan) -> Plan:
    """The plan with movements at the seams next to where they are due, if it stays legal so.

    Where not all can be there at once, one after another is tried.
    """
    seams = seams_of(trace)
    moved = [_moved(it, seams) for it in plan.assignments]
    found = reassigned(trace, hardware, plan, moved)
    if found is not None:
        return found
    for place, back in product(range(len(moved)), (True, False)):
        assignment = _moved(plan.assignments[place], seams, free=not back, back=back)
        if assignment != plan.assignments[place]:
            one = [*plan.assignments[:place], assignment, *plan.assignments[place + 1 :]]
            plan = reassigned(trace, hardware, plan, one) or plan
    return plan


def as_fused(trace: Trace) -> Trace:
    """The trace with ops as they are inside of fused kernels."""
    ops = (
        replace(faster(op, _OF_FUSED), fusion=fusion_of(op.name)) if fuses(op) else op
        for op in trace.ops
    )
    return replace(trace, ops=tuple(ops))


def seams_of(trace: Trace) -> list[int]:
    """Boundaries at which a movement makes no two kernels of one."""
    return _seams([fuses(op) for op in trace.ops])


def told_at(trace: Trace) -> list[int]:
    """Some of these, at which an engine may note the time: so many ops from one to the next."""
    found, last = list[int](), 0
    for seam in seams_of(trace)[:-1]:
        if seam - last >= _TOLD and trace.ops[seam].phase is not Phase.LOSS:
            found.append(seam)
            last = seam
    return found


def read_in_run(
    steps: Sequence[Step],
    layout: Layout,
    acts: Mapping[int, list[tuple[Act, int]]],
    moved: Collection[fx.Node],
) -> list[list[fx.Node]]:
    """Of what was ``moved``, what each run that may be fused reads: at its first op, of each op."""
    ops = [step for step in steps if layout.is_op(step)]
    fused = [
        is_fused(name_of(step)) and not is_random(step) and not layout.writes_to(step)
        for step in ops
    ]
    ends, found, start = {*_seams(fused), *acts}, [list[fx.Node]() for _ in ops], 0
    for at, step in enumerate(ops):
        start = at if at in ends else start
        found[start] += [node for node in step.inputs if node in moved]
    return found


def fuses(op: Op) -> bool:
    """Whether a compiler makes one kernel of an op of a trace and of its neighbours."""
    return is_fused(op.name) and not op.random and not op.mutates


def _seams(fused: Sequence[bool]) -> list[int]:
    """Boundaries beside an op that is not fused, and the ends."""
    inner = (at for at, (one, two) in enumerate(pairwise(fused), 1) if not (one and two))
    return [0, *inner, len(fused)]


def _moved(
    assignment: Assignment, seams: Sequence[int], *, free: bool = True, back: bool = True
) -> Assignment:
    """The assignment with the end of a copy out, or the start of one back, at a seam."""
    move = assignment.decision
    if not isinstance(move, Offload):
        return assignment
    gone = seams[bisect_left(seams, move.free_at)] if free else move.free_at
    here = seams[bisect_right(seams, move.copy_in_at) - 1] if back else move.copy_in_at
    if here <= gone:
        return assignment
    return replace(assignment, decision=replace(move, free_at=gone, copy_in_at=here))
