"""The one judge: may this plan run on this trace, here, within this budget?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from belady.errors import InfeasibleBudgetError, PlanMismatchError
from belady.ir.curves import curve, tier_curve
from belady.ir.encoding import encoding_of
from belady.ir.hardware import HardwareProfile
from belady.ir.margin import needed
from belady.ir.plan import Budget, Encode, Managed, Offload, Plan, Recompute
from belady.ir.replay import reasons
from belady.ir.residency import away, intervals
from belady.ir.trace import Tier, Trace


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why a plan may not run; -1 where no op, value or number of bytes is meant."""

    message: str
    op: int = -1
    value: int = -1
    nbytes: int = -1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `check` found.

    Attributes
    ----------
    peak_bytes, peak_op
        Device peak, allocator rounding included and margin excluded, and the op at it.
    needed_bytes, needed_op
        Smallest budget with the margin, and the op that asks for it.
    host_bytes, disk_bytes
        Most bytes held in the other tiers.
    problems
        Empty when the plan may run.
    """

    peak_bytes: int
    peak_op: int
    needed_bytes: int
    needed_op: int
    host_bytes: int
    disk_bytes: int
    problems: tuple[Problem, ...]

    @property
    def ok(self) -> bool:
        """Whether the plan may run."""
        return not self.problems


def check(trace: Trace, hardware: HardwareProfile, plan: Plan, budget: Budget) -> Verdict:
    """Judge a plan.

    Returns
    -------
    Verdict
        With a `Problem` for every rule that the plan breaks, naming op, value and bytes.

    Raises
    ------
    PlanMismatchError
        If the plan is for another trace.
    """
    if plan.trace != trace.fingerprint:
        raise PlanMismatchError(
            f"this plan is for trace {plan.trace}, not for {trace.fingerprint}: make a new plan "
            "with `belady plan`"
        )
    problems = [*_unknown_ids(trace, plan)]
    if problems:
        return _broken(problems)
    problems += _not_executable(plan)
    problems += _unreachable(hardware, plan)
    for value in plan.decisions:
        problems += _decision_problems(trace, plan, value)
    if problems:
        return _broken(problems)
    spans = intervals(trace, plan)
    held = curve(trace, plan, hardware.allocator, spans)
    peak_op = max(range(len(held)), key=held.__getitem__, default=0)
    peak = held[peak_op] if held else 0
    host = max(tier_curve(spans, Tier.HOST, len(trace.ops)), default=0)
    disk = max(tier_curve(spans, Tier.DISK, len(trace.ops)), default=0)
    asked, asking = needed(trace, hardware.allocator, held)
    if trace.ops:
        problems += _over_budget(trace, budget, asked, asking, held[asking])
    problems += _over_capacity(hardware, budget, host, disk)
    return Verdict(peak, peak_op, asked, asking, host, disk, tuple(problems))


def _broken(problems: list[Problem]) -> Verdict:
    return Verdict(0, 0, 0, 0, 0, 0, tuple(problems))


def require(trace: Trace, hardware: HardwareProfile, plan: Plan, smallest_bytes: int) -> Verdict:
    """Judge a plan by its own budget and raise if it may not run.

    Raises
    ------
    InfeasibleBudgetError
        If the device peak does not fit; ``smallest_bytes`` is named as the way out.
    PlanMismatchError
        If anything else is wrong with the plan.
    """
    verdict = check(trace, hardware, plan, plan.budget)
    if verdict.ok:
        return verdict
    if verdict.needed_bytes > plan.budget.device_bytes and trace.ops:
        op = trace.ops[verdict.needed_op]
        raise InfeasibleBudgetError(
            needed_bytes=verdict.needed_bytes,
            budget_bytes=plan.budget.device_bytes,
            smallest_bytes=smallest_bytes,
            op=op.name,
            module=op.module,
        )
    raise PlanMismatchError("; ".join(problem.message for problem in verdict.problems))


def _unknown_ids(trace: Trace, plan: Plan) -> Iterator[Problem]:
    seen: set[int] = set()
    for assignment in plan.assignments:
        value = assignment.value
        if not 0 <= value < len(trace.values):
            yield Problem(f"value {value} does not exist: the trace has {len(trace.values)}")
        elif value in seen:
            yield Problem(f"value {value} has two decisions", value=value)
        seen.add(value)
    for op, name in plan.layer_algorithms:
        if not 0 <= op < len(trace.ops) or name not in {a.name for a in trace.ops[op].algorithms}:
            yield Problem(f"op {op} has no algorithm {name!r}", op=op)


def _not_executable(plan: Plan) -> Iterator[Problem]:
    for name in ("sections", "order_edits", "reuse_classes"):
        if getattr(plan, name):
            yield Problem(f"no engine carries out {name} yet")


def _unreachable(hardware: HardwareProfile, plan: Plan) -> Iterator[Problem]:
    """Tiers that the plan uses and this machine has not, or has no link to or from."""
    users: dict[Tier, int] = {}
    for value, decision in plan.decisions.items():
        if isinstance(decision, Offload):
            users.setdefault(decision.tier, value)
        elif isinstance(decision, Managed) and hardware.managed is None:
            yield Problem(f"value {value}: {hardware.no_managed}", value=value)
            return
    for tier, value in users.items():
        if tier is Tier.DEVICE:
            yield Problem(f"value {value}: offload to the device itself", value=value)
        elif hardware.capacity(tier) <= 0:
            yield Problem(
                f"value {value}: machine {hardware.name!r} has no tier {tier.value}", value=value
            )
        else:
            for near, far in pairwise(hardware.stops(tier)):
                for ends in ((near, far), (far, near)):
                    if hardware.link(*ends) is None:
                        yield Problem(
                            f"value {value}: machine {hardware.name!r} has no link from "
                            f"{ends[0].value} to {ends[1].value}",
                            value=value,
                        )


def _decision_problems(trace: Trace, plan: Plan, index: int) -> Iterator[Problem]:
    value, decision = trace.values[index], plan.decisions[index]
    storage = trace.storages[value.storage]
    if not value.saves:
        yield Problem(f"value {index} is never saved, so it cannot move", value=index)
        return
    if storage.persistent:
        yield Problem(f"value {index} is a {storage.kind.value} and cannot move", value=index)
        return
    # Reads may never come (backward of some outputs only); then the drop bounds the decision.
    last = value.first_read if value.first_read is not None else value.dropped
    if isinstance(decision, Offload):
        yield from _offload_problems(trace, index, decision, last)
    elif isinstance(decision, Managed):
        yield from _offload_problems(trace, index, decision.moves, last)
        if decision.faults and decision.prefetch_in_at != decision.ready_by:
            yield Problem(
                f"value {index}: its pages fault in when they are read, at {decision.ready_by}, "
                f"so nothing can be issued at {decision.prefetch_in_at}",
                value=index,
            )
    elif isinstance(decision, Recompute):
        for message, op in reasons(trace, index, plan.decisions):
            yield Problem(f"value {index}: {message}", op=op, value=index)
    elif isinstance(decision, Encode):
        for message in _encode_problems(trace, index, decision, last):
            yield Problem(f"value {index}: {message}", value=index)


def _encode_problems(trace: Trace, index: int, decision: Encode, last: int) -> Iterator[str]:
    saved, read = decision.encode_at, decision.decode_at
    if not trace.values[index].first_save == saved <= read <= last:
        yield (
            f"encoded at {saved} and decoded at {read}, "
            f"but it is saved at {trace.values[index].first_save} and read at {last}"
        )
    known = encoding_of(trace, index)
    if known != (decision.codec, decision.nbytes):
        has = "no encoding" if known is None else f"{known.codec!r} in {known.nbytes} bytes"
        yield (
            f"to be held as {decision.codec!r} in {decision.nbytes} bytes, "
            f"but what is known to give back what backward asks for is {has}"
        )


def _offload_problems(trace: Trace, index: int, decision: Offload, read: int) -> Iterator[Problem]:
    saved = trace.values[index].first_save
    out, free = decision.copy_out_after + 1, decision.free_at
    back, ready = decision.copy_in_at, decision.ready_by
    if not saved <= out <= free <= back <= ready <= read:
        yield Problem(
            f"value {index}: saved at {saved}, copied out at {out}, freed at {free}, copied in at "
            f"{back}, ready by {ready}, read at {read}: these must not decrease",
            value=index,
        )
        return
    gone, returned = away(trace, index, decision)
    if gone >= returned or trace.storages[trace.values[index].storage].nbytes == 0:
        yield Problem(
            f"value {index}: its bytes would be off the device for no op: gone at {gone}, back at "
            f"{returned}",
            value=index,
        )


def _over_budget(trace: Trace, budget: Budget, asked: int, at: int, held: int) -> Iterator[Problem]:
    if asked > budget.device_bytes:
        yield Problem(
            f"{trace.locate(at)} holds {held} bytes at the peak and so needs a budget of "
            f"{asked}, more than the {budget.device_bytes} given",
            op=at,
            nbytes=asked - budget.device_bytes,
        )


def _over_capacity(
    hardware: HardwareProfile, budget: Budget, host: int, disk: int
) -> Iterator[Problem]:
    for tier, held, limit in (
        (Tier.HOST, host, budget.host_bytes),
        (Tier.DISK, disk, budget.disk_bytes),
    ):
        room = hardware.capacity(tier) if limit is None else min(limit, hardware.capacity(tier))
        if held > room:
            yield Problem(
                f"the plan holds {held} bytes in tier {tier.value}, which has room for {room}",
                nbytes=held - room,
            )
