"""Predict an iteration: when each op and copy runs, and what compute waits for.

The order of issue is that of the eager engine. The host issues ops in order; at the boundary
before each it issues the plan's actions: copy-outs, then frees, copy-ins, waits and replays,
values in the order of the plan. Six lanes carry the work, each first in, first out
(`belady.simulate.lanes`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from belady.errors import PlanMismatchError
from belady.ir.codecs import passes
from belady.ir.hardware import HardwareProfile, Link
from belady.ir.plan import Encode, Managed, Offload, Plan, Recompute
from belady.ir.replay import compared_share, hook_seconds, run_by, sources
from belady.ir.residency import offload_boundaries
from belady.ir.timeline import Cause, Lane, Timeline
from belady.ir.trace import Phase, Tier, Trace
from belady.simulate.lanes import Task, computed_at, run
from belady.simulate.outcome import timeline_of
from belady.simulate.routes import ways


class _Action(IntEnum):
    """What a plan does at a boundary, in order of issue."""

    COPY_OUT = 0
    ENCODE = 1
    FREE = 2
    COPY_IN = 3
    READY = 4
    DECODE = 5
    DIGEST = 6
    REPLAY = 7


# Each value that is not kept has one of them.
_SAVES = (_Action.COPY_OUT, _Action.ENCODE, _Action.DIGEST)


def simulate(trace: Trace, hardware: HardwareProfile, plan: Plan) -> Timeline:
    """Predict the iteration that ``plan`` makes of ``trace`` on ``hardware``.

    Returns
    -------
    Timeline
        Seconds from the first issue to the moment when compute has done, and waited for, all.
        Each idle moment of compute is in one stall; a copy is charged only with what it adds
        to the host's own delay. A wait at the end of the iteration has op -1.

    Raises
    ------
    PlanMismatchError
        If the plan is for another trace, or asks for what cannot be simulated.
    TierError
        If the machine has no link to a tier that the plan uses.
    """
    return timeline_of(trace, hardware, plan, _tasks(trace, hardware, plan))


def iteration_seconds(trace: Trace, hardware: HardwareProfile, plan: Plan) -> float:
    """Duration that `simulate` predicts, in less time; it raises the same."""
    return computed_at(_tasks(trace, hardware, plan))


def _tasks(trace: Trace, hardware: HardwareProfile, plan: Plan) -> list[Task]:
    """What every lane does, in order of issue, with start and end."""
    _refuse(trace, plan)
    issuer = Issuer(trace, hardware, plan)
    issuer.issue()
    run(issuer.tasks)
    return issuer.tasks


def _refuse(trace: Trace, plan: Plan) -> None:
    if plan.trace != trace.fingerprint:
        raise PlanMismatchError(f"this plan is for trace {plan.trace}, not for {trace.fingerprint}")
    if plan.sections or plan.order_edits:
        raise PlanMismatchError("sections and order edits must be applied before simulating")
    for value, decision in plan.decisions.items():
        if not isinstance(decision, (Offload, Encode, Managed, Recompute)):
            kind = type(decision).__name__
            raise PlanMismatchError(f"value {value}: {kind} cannot be simulated")


def _actions(trace: Trace, plan: Plan) -> dict[int, list[tuple[_Action, int]]]:
    """Actions of the plan by boundary, in order of issue."""
    found: list[tuple[int, _Action, int, int]] = []
    for value, decision in plan.decisions.items():
        if isinstance(decision, (Offload, Managed)):
            move = decision if isinstance(decision, Offload) else decision.moves
            out, free, back = offload_boundaries(trace, move)
            # Rounding to anchors may take the bytes back only after ready_by.
            ready = max(move.ready_by, back)
            at = (out, free, back, ready)
            kinds = (_Action.COPY_OUT, _Action.FREE, _Action.COPY_IN, _Action.READY)
            found += [(boundary, kind, 0, value) for boundary, kind in zip(at, kinds, strict=True)]
        elif isinstance(decision, Encode):
            found.append((decision.encode_at, _Action.ENCODE, 0, value))
            found.append((decision.decode_at, _Action.DECODE, 0, value))
        elif isinstance(decision, Recompute):
            found.append((trace.values[value].first_save, _Action.DIGEST, 0, value))
            # One replay may start from what another one makes.
            found.append((decision.at, _Action.REPLAY, decision.ops[-1], value))
    found.sort(key=lambda entry: entry[:3])
    by_boundary: dict[int, list[tuple[_Action, int]]] = {}
    for boundary, kind, _, value in found:
        by_boundary.setdefault(boundary, []).append((kind, value))
    return by_boundary


@dataclass(slots=True)
class Issuer:
    """Issues the tasks of an iteration as the host would."""

    trace: Trace
    hardware: HardwareProfile
    plan: Plan
    tasks: list[Task] = field(default_factory=list)
    compute: Task | None = None  # the newest task of the compute lane
    host: Task | None = None
    copies: dict[int, list[Task]] = field(default_factory=dict)  # by value, in order of issue
    known_routes: dict[Tier, tuple[list[tuple[Lane, Link]], ...]] = field(default_factory=dict)
    hook_s: float = 0.0
    joined: int = 0  # boundary at which compute waits for all copies; 0: none
    ran: set[int] = field(default_factory=set)  # by replays at this boundary

    def issue(self) -> None:
        """Issue all of them."""
        self.hook_s = hook_seconds(self.trace, self.hardware)
        self.joined = last_of_forward(self.trace) + 1 if self.hardware.joins else 0
        actions = _actions(self.trace, self.plan)
        seconds = kernel_seconds(self.trace, self.plan)
        for boundary in range(len(self.trace.ops) + 1):
            joins = 0 < boundary == self.joined
            # What is due where the user's code runs is issued when the part before ends.
            within = joins and self.trace.ops[boundary].phase is Phase.LOSS
            self.ran.clear()
            if joins and not within:
                self._join()
            for kind, value in actions.get(boundary, ()):
                self._act(kind, value, boundary)
            if within:
                self._join()
            if boundary < len(seconds):
                self._work(boundary, self.trace.ops[boundary].host_seconds, seconds[boundary])

    def _work(self, index: int, host_s: float, seconds: float, value: int = -1) -> None:
        # A CPU has one thread for both: the host goes on when the op is done.
        serial = self.trace.device == "cpu"
        if host_s or serial:
            after = (self.compute,) if serial and self.compute else ()
            self.host = self._add(Task(Lane.HOST, host_s, after, op=index, value=value))
        # What takes the host no time, as what is launched, comes after what it issued last.
        host = (self.host,) if self.host else ()
        self.compute = self._add(Task(Lane.COMPUTE, seconds, host, op=index, value=value))

    def _act(self, kind: _Action, value: int, boundary: int) -> None:
        if self.hook_s and kind in _SAVES:
            self.host = self._add(Task(Lane.HOST, self.hook_s, value=value))
        if kind is _Action.COPY_OUT:
            self._copy_out(value, boundary)
        elif kind is _Action.COPY_IN:
            self._copy_in(value)
        elif kind is _Action.FREE:
            self._wait(self.copies[value][0], Cause.COPY_OUT)
        elif kind is _Action.READY:
            self._wait(self.copies[value][-1], Cause.COPY_IN)
        elif kind is _Action.REPLAY:
            self._replay(value, boundary)
        else:
            self._pass_over(value, boundary)

    def _copy_out(self, value: int, boundary: int) -> None:
        there, _ = self._routes(value)
        if isinstance(self.plan.decisions[value], Managed):
            # Into its block: as much is written as is read.
            self._pass_over(value, boundary)
        # All compute issued so far comes first: the copy reads what it wrote.
        after = (*self._issue(there[0][1], value), *((self.compute,) if self.compute else ()))
        for lane, link in there:
            after = (self._copy(value, lane, link, after),)

    def _copy_in(self, value: int) -> None:
        _, back = self._routes(value)
        host = self._issue(back[-1][1], value)
        for lane, link in back:
            after: tuple[Task, ...] = (self.copies[value][-1], *host)
            if link.target is Tier.DEVICE and self.compute is not None:
                # Bytes taken on the device may still be in use by compute issued before.
                after = (*after, self.compute)
            self._copy(value, lane, link, after)

    def _issue(self, link: Link | None, value: int) -> tuple[Task, ...]:
        """The host's part of a copy or a pass: what must have ended before it starts."""
        if link is not None and link.issue_s:
            self.host = self._add(Task(Lane.HOST, link.issue_s, value=value))
        return (self.host,) if self.host else ()

    def _copy(self, value: int, lane: Lane, link: Link, after: tuple[Task, ...]) -> Task:
        nbytes = self.trace.storages[self.trace.values[value].storage].nbytes
        task = Task(lane, link.seconds(nbytes), after, value=value, nbytes=nbytes, link=link)
        self.copies.setdefault(value, []).append(task)
        return self._add(task)

    def _wait(self, copy: Task, cause: Cause) -> None:
        self.compute = self._add(Task(Lane.COMPUTE, 0.0, (copy,), value=copy.value, cause=cause))

    def _join(self) -> None:
        # A lane ends with the newest of its copies.
        newest = {task.lane: task for task in self.tasks if task.link is not None}
        for lane, task in newest.items():
            back = lane in (Lane.COPY_IN, Lane.DISK_READ)
            self._wait(task, Cause.COPY_IN if back else Cause.COPY_OUT)

    def _replay(self, value: int, boundary: int) -> None:
        decision = self.plan.decisions[value]
        if isinstance(decision, Recompute):
            for source in sources(self.trace, decision):
                if source in self.copies:
                    self._wait(self.copies[source][-1], Cause.COPY_IN)
            ops = run_by(self.trace, decision, self.ran)
            host_s = sum(self.trace.ops[op].host_seconds for op in ops)
            seconds = sum(self.trace.replays[op].device_seconds for op in ops)
            self._work(boundary, host_s, seconds, value)
            self._pass_over(value, boundary)

    def _pass_over(self, value: int, boundary: int) -> None:
        """The device reads all bytes of a value, or writes them, and those of an encoding.

        Of a replay it does so in some iterations: their share of the seconds is in each. The host
        takes the value over, and makes it again, in all of them.
        """
        decision = self.plan.decisions[value]
        nbytes = self.trace.storages[self.trace.values[value].storage].nbytes
        if isinstance(decision, Encode):
            both = passes(decision, nbytes)
            nbytes = both.decode if boundary == decision.decode_at else both.encode
        elif isinstance(decision, Managed):
            nbytes += nbytes
        share = compared_share(self.trace) if isinstance(decision, Recompute) else 1.0
        seconds = share * self.hardware.memory_seconds(nbytes)
        if seconds or isinstance(decision, Encode):
            host = self._issue(self.hardware.link(Tier.DEVICE, Tier.DEVICE), value)
            task = Task(Lane.COMPUTE, seconds, host, op=boundary, value=value)
            self.compute = self._add(task)

    def _routes(self, value: int) -> tuple[list[tuple[Lane, Link]], ...]:
        decision = self.plan.decisions[value]
        if not isinstance(decision, Offload):
            return ways(self.hardware, decision)
        # Asked for at every copy of thousands.
        if decision.tier not in self.known_routes:
            self.known_routes[decision.tier] = ways(self.hardware, decision)
        return self.known_routes[decision.tier]

    def _add(self, task: Task) -> Task:
        self.tasks.append(task)
        return task


def last_of_forward(trace: Trace) -> int:
    """Index of the last op of forward before the first of backward; -1 where either is lacking."""
    phases = [op.phase for op in trace.ops]
    if Phase.BACKWARD not in phases:
        return -1
    before = range(phases.index(Phase.BACKWARD))
    return max((at for at in before if phases[at] is Phase.FORWARD), default=-1)


def kernel_seconds(trace: Trace, plan: Plan) -> list[float]:
    """Kernel seconds of each op with the algorithms that ``plan`` chooses.

    Raises
    ------
    PlanMismatchError
        If the plan chooses an algorithm that its op does not have.
    """
    seconds = [op.device_seconds for op in trace.ops]
    for index, name in plan.layer_algorithms:
        by_name = {a.name: a.device_seconds for a in trace.ops[index].algorithms}
        if name not in by_name:
            raise PlanMismatchError(f"{trace.locate(index)} has no algorithm {name!r}")
        seconds[index] = by_name[name]
    return seconds
