"""What a plan asks of each call of a graph."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from torch import fx

from belady.errors import PlanMismatchError
from belady.graph.joint import Step
from belady.graph.parts import Drawn, ops_of
from belady.graph.placing import gradients_of
from belady.graph.replays import again, shortcut_of
from belady.ir.curves import curve
from belady.ir.hardware import Allocator
from belady.ir.plan import Decision, Encode, Managed, Offload, Plan, Recompute
from belady.ir.residency import offload_boundaries
from belady.ir.trace import Phase, Trace


class Act(IntEnum):
    """What is done to a value at a boundary, in order of issue.

    First of all it is told that a boundary, numbered as in the trace, is ``PASSED``.
    """

    PASSED = -1
    SEND = 0
    ENCODE = 1
    FREE = 2
    BRING = 3


# What kernels of a long run may hold beyond its ops in the order of the trace, in largest values.
# With 2 ResNet-50 ran out of memory within 4.5 GiB of an H200, in a run farther from the peak.
_BEYOND = 4
# Of a budget that is used: what margins leave of it.
_FILLED = 0.7
_EXACT = Allocator(1, 0.0, 0)

Acts = dict[int, list[tuple[Act, int]]]


@dataclass(frozen=True)
class Orders:
    """Decisions for one call of a graph, in its own numbers.

    Attributes
    ----------
    held
        Storages whose bytes are moved or encoded, and the number of the value in the trace.
    replayed
        Storages that are made again, and the steps that do it, in order, as they run again.
    due
        Of those the ones that are made again at a boundary of backward, whether or not it reads
        them there.
    forward, backward
        What is done at a boundary of that part: before op ``i`` of it, or at its end. The values
        are numbers of the trace, also those of other calls, and the boundaries that are passed are.
    scarce
        Ops of both parts during which more may not fit than the plan counts.
    apart
        What backward makes of gradients that have memory of their own.
    """

    held: Mapping[int, int] = field(default_factory=dict)
    replayed: Mapping[int, tuple[Step, ...]] = field(default_factory=dict)
    due: Mapping[int, Sequence[int]] = field(default_factory=dict)
    forward: Mapping[int, list[tuple[Act, int]]] = field(default_factory=dict)
    backward: Mapping[int, list[tuple[Act, int]]] = field(default_factory=dict)
    scarce: tuple[Collection[int], Collection[int]] = ((), ())
    apart: Collection[fx.Node] = ()


AS_SAVED = Orders()


def orders_of(
    drawn: Drawn, plan: Plan, *, gradients_apart: bool = False, told: Iterable[int] = ()
) -> list[Orders]:
    """The orders of every call.

    Parameters
    ----------
    gradients_apart
        Whether large gradients of parameters have memory of their own.
    told
        Boundaries of ops of graphs at which it is told that they are passed, whatever is due.

    Raises
    ------
    PlanMismatchError
        If the plan is for another trace, moves a value in managed memory, or makes a value again
        from what another call has.
    """
    _demand_possible(drawn.trace, plan)
    found = [
        (dict[int, int](), dict[int, tuple[Step, ...]](), dict[int, list[int]]())
        for _ in drawn.values
    ]
    lies_on, again_by = _by_value(drawn), _Steps(drawn)
    due: list[tuple[int, Act, int]] = []
    for value, decision in plan.decisions.items():
        storages = _storages(drawn, lies_on, value)
        if isinstance(decision, Recompute):
            part = bisect_right(drawn.starts, decision.at) - 1
            for call, storage in storages.items():
                found[call][1][storage] = again_by.of(call, decision)
                if drawn.parts[part].call == call and not drawn.parts[part].forward:
                    at = decision.at - drawn.starts[part]
                    found[call][2].setdefault(at, []).append(storage)
            continue
        for call, storage in storages.items():
            found[call][0][storage] = value
        due += [(boundary, act, value) for boundary, act in _due(drawn.trace, decision)]
    acts = _by_part(drawn, due)
    for boundary in told:
        part = bisect_right(drawn.starts, boundary) - 1
        passed = [(Act.PASSED, boundary)]
        acts[part].setdefault(boundary - drawn.starts[part], passed)
    scarce = _scarce(drawn, plan)
    # A call without a backward has nothing to do in one.
    acts.append({})
    scarce.append(set())
    forward, backward = _parts_of(drawn, forward=True), _parts_of(drawn, forward=False)
    ends = [(forward[call], backward.get(call, -1)) for call in range(len(found))]
    apart = [gradients_of(drawn.parts[there]) if gradients_apart else () for there, _ in ends]
    return [
        Orders(*found[call], acts[there], acts[back], (scarce[there], scarce[back]), apart[call])
        for call, (there, back) in enumerate(ends)
    ]


def _demand_possible(trace: Trace, plan: Plan) -> None:
    if plan.trace != trace.fingerprint:
        raise PlanMismatchError(f"the plan is for trace {plan.trace}, not {trace.fingerprint}")
    for value, decision in plan.decisions.items():
        if isinstance(decision, Managed):
            raise PlanMismatchError(
                f"value {value}: graphs move nothing in managed memory; use engine='eager'"
            )


def _due(trace: Trace, decision: Decision) -> list[tuple[int, Act]]:
    """What a decision does to a value that leaves the device, and at which boundaries."""
    if isinstance(decision, Offload):
        boundaries = offload_boundaries(trace, decision)
        return list(zip(boundaries, (Act.SEND, Act.FREE, Act.BRING), strict=True))
    if isinstance(decision, Encode):
        return [(decision.encode_at, Act.ENCODE), (decision.decode_at, Act.BRING)]
    return []


def _scarce(drawn: Drawn, plan: Plan) -> list[set[int]]:
    """Of each part, the ops that hold nearly as much as the plan does at its peak.

    A plan that leaves much of its budget has room for more everywhere.
    """
    found: list[set[int]] = [set() for _ in drawn.parts]
    if plan.moves_nothing:
        return found
    moving = (it.nbytes for it in drawn.trace.storages if not it.persistent)
    peak = max(plan.predicted_peak_bytes, int(_FILLED * plan.budget.device_bytes))
    least = peak - _BEYOND * max(moving, default=0)
    for op, nbytes in enumerate(curve(drawn.trace, plan, _EXACT)):
        if nbytes > least:
            part = bisect_right(drawn.starts, op) - 1
            found[part].add(op - drawn.starts[part])
    return found


def _by_value(drawn: Drawn) -> list[dict[int, int]]:
    """For each call, the storage of its graph that a value lies on."""
    return [{value: storage for storage, value in of.items()} for of in drawn.values]


def _storages(drawn: Drawn, lies_on: list[dict[int, int]], value: int) -> dict[int, int]:
    """For each call that saves the value, the storage of its graph that it lies on."""
    calls = sorted({save.pass_index for save in drawn.trace.values[value].saves})
    return {call: lies_on[call][value] for call in calls if value in lies_on[call]}


class _Steps:
    """The steps of the ops of a trace, as they run again."""

    def __init__(self, drawn: Drawn) -> None:
        self._drawn, self._parts = drawn, _parts_of(drawn, forward=True)
        self._ops = {call: ops_of(drawn.parts[part]) for call, part in self._parts.items()}

    def of(self, call: int, decision: Recompute) -> tuple[Step, ...]:
        """Those of a replay, which are all of one call."""
        part, steps = self._parts[call], self._ops[call]
        start = self._drawn.starts[part]
        if not all(0 <= op - start < len(steps) for op in decision.ops):
            raise PlanMismatchError(f"ops {decision.ops} are not all of graph call {call}")
        joint, ops = self._drawn.parts[part].joint, self._drawn.trace.ops
        return tuple(
            (shortcut_of(joint, steps[op - start]) if ops[op].shortcut else None)
            or again(steps[op - start])
            for op in decision.ops
        )


def _parts_of(drawn: Drawn, *, forward: bool) -> dict[int, int]:
    return {it.call: i for i, it in enumerate(drawn.parts) if it.forward is forward}


def _by_part(drawn: Drawn, due: list[tuple[int, Act, int]]) -> list[Acts]:
    """What each part does, by its own boundaries.

    What is due where the user's code runs, or at the very end, is done when the part before ends.
    """
    # Its end is passed too: what runs between two parts is of no op of theirs.
    lengths = [len(ops_of(part)) for part in drawn.parts] if due else []
    found: list[Acts] = [{} for _ in drawn.parts]
    for acts, start, length in zip(found, drawn.starts, lengths, strict=False):
        acts[length] = [(Act.PASSED, start + length)]
    ops = drawn.trace.ops
    # Sorting keeps the order of the plan among equals.
    for boundary, act, value in sorted(due, key=lambda it: it[:2]):
        at = boundary
        if boundary == len(ops) or ops[boundary].phase is Phase.LOSS:
            at = boundary - 1
        part = bisect_right(drawn.starts, at) - 1
        passed = [(Act.PASSED, boundary)]
        found[part].setdefault(boundary - drawn.starts[part], passed).append((act, value))
    return found
