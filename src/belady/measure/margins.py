"""How much of a budget is left to torch's allocator: margins whose plans' blocks fit.

A margin stands for what is lost between blocks, which differs from plan to plan. It is simulated
(`belady.simulate.blocks`), so that a plan that would make the allocator flush its cache need not
run to be known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.trace import StorageKind, Tier, Trace
from belady.measure.corrections import unhindered_seconds, wider
from belady.planners import traits_of
from belady.planners.price import KEPT, price
from belady.planners.workspace import convolves
from belady.simulate.blocks import excess

# Of a wider margin, where the budget has no room for all of it; of a smaller one, where blocks
# would not fit into one another with all of it.
_PARTS, _PARTS_LESS = (1.0, 0.5, 0.25, 0.125), (1.0, 0.5, 0.0)
# Smaller margins that are tried for a plan that loses so much, and what one has to gain: room that
# is left is room for what is not simulated.
_TIGHTER, _LOSES, _GAINS = 2, 1.01, 0.995
# Part of the budget from which on a convolution's workspace is a reason for none of these: where
# cuDNN does not get it, it takes another algorithm, whose replays come out otherwise.
_ASKS = 0.02
# Of more ops a plan takes long, and few are made.
_OPS = 5_000
# By how much more than it lacks a plan is asked to shrink.
_MORE = 1.5

# Makes the plan for a machine, or raises `InfeasibleBudgetError`.
Make = Callable[[HardwareProfile], Plan]


def with_settled(trace: Trace, hardware: HardwareProfile, policy: str) -> HardwareProfile:
    """The machine on which ``policy`` asks for no margin on what is there all the time.

    Gradients are not: between two iterations others may have their memory. Policies that do as
    their papers say ask for a margin on everything.
    """
    if not traits_of(policy).fills:
        return hardware
    nbytes = sum(
        hardware.allocator.held(it.nbytes)
        for it in trace.storages
        if it.home is Tier.DEVICE and it.kind is not StorageKind.GRADIENT
    )
    return replace(hardware, allocator=replace(hardware.allocator, settled_bytes=nbytes))


def suited(trace: Trace, hardware: HardwareProfile, make: Make) -> tuple[Plan, HardwareProfile]:
    """A plan whose blocks fit, of a smaller margin where that is faster; else that of ``hardware``.

    Returns
    -------
    plan : Plan
    hardware : HardwareProfile
        With the margin for which it was made.

    Raises
    ------
    InfeasibleBudgetError
        If there is no plan with the margin of ``hardware``.
    """
    plan, suits, fitting = _with_room(trace, hardware, make)
    if suits is not hardware or not fitting:
        return plan, suits
    least = unhindered_seconds(trace)
    loses = not plan.moves_nothing and plan.predicted_seconds > _LOSES * least
    workspace = max((op.workspace_bytes for op in trace.ops if convolves(op)), default=0)
    asks = workspace > _ASKS * plan.budget.device_bytes
    if hardware.allocator.margin_fraction <= 0 or len(trace.ops) > _OPS or asks or not loses:
        return plan, hardware
    return _tighter(trace, plan, hardware, make)


def stated(_: Trace, hardware: HardwareProfile, make: Make) -> tuple[Plan, HardwareProfile]:
    """The plan of the margin of ``hardware``, whatever fits."""
    return make(hardware), hardware


def roomy(trace: Trace, hardware: HardwareProfile, make: Make) -> tuple[Plan, HardwareProfile]:
    """As `suited`, of the margin of ``hardware`` or of a wider one alone."""
    plan, suits, _ = _with_room(trace, hardware, make)
    return plan, suits


def _with_room(
    trace: Trace, hardware: HardwareProfile, make: Make
) -> tuple[Plan, HardwareProfile, bool]:
    """As `roomy`, and whether its blocks fit."""
    plan = make(hardware)
    if fits(trace, plan, hardware):
        return plan, hardware, True
    wider_one = _roomier(trace, plan, hardware, make)
    return (plan, hardware, False) if wider_one is None else (*wider_one, True)


def towards(
    trace: Trace, before: float, hardware: HardwareProfile, make: Make
) -> tuple[Plan, HardwareProfile] | None:
    """A plan with the margin of ``hardware``, or with as much of the change as can be had.

    Parameters
    ----------
    before
        The margin so far. One that is smaller takes a plan whose blocks fit.
    """
    after = hardware.allocator.margin_fraction
    for part in _PARTS_LESS if after < before else _PARTS if after > before else _PARTS[:1]:
        changed = _with(hardware, before + part * (after - before))
        try:
            plan = make(changed)
        except InfeasibleBudgetError:
            continue
        if changed.allocator.margin_fraction >= before or fits(trace, plan, changed):
            return plan, changed
    return None


def _tighter(
    trace: Trace, plan: Plan, hardware: HardwareProfile, make: Make
) -> tuple[Plan, HardwareProfile]:
    """The fastest plan of smaller and smaller margins in which its blocks fit."""
    found, enough, least = (plan, hardware), hardware.allocator.margin_fraction, 0.0
    for _ in range(_TIGHTER):
        changed = _with(hardware, (least + enough) / 2)
        other = make(changed)
        if other.predicted_seconds >= _GAINS * found[0].predicted_seconds:
            # What is between the two, or half of that again, gains less.
            break
        if fits(trace, other, changed):
            enough, found = changed.allocator.margin_fraction, (other, changed)
        else:
            least = changed.allocator.margin_fraction
    return found


def _roomier(
    trace: Trace, plan: Plan, hardware: HardwareProfile, make: Make
) -> tuple[Plan, HardwareProfile] | None:
    """A plan with a wider margin in which its blocks fit, if it is worth that much time.

    Where an op's workspace has hardly any room, wider ones can leave much slower plans only.
    """
    allocator, budget = hardware.allocator, plan.budget.device_bytes
    over = excess(trace, plan, allocator)
    most = price(plan.predicted_seconds, over, KEPT)
    lacking = over * budget / max(1, budget - allocator.settled_bytes)
    little = (1 + allocator.margin_fraction) * (1 + _MORE * lacking) - 1
    more = wider(allocator), wider(wider(allocator))
    margins = sorted((little, *(it.margin_fraction for it in more)))
    for margin in margins[: 1 if len(trace.ops) > _OPS else None]:
        changed = _with(hardware, margin)
        try:
            other = make(changed)
        except InfeasibleBudgetError:
            return None
        if other.predicted_seconds <= most and fits(trace, other, changed):
            return other, changed
    return None


def fits(trace: Trace, plan: Plan, hardware: HardwareProfile) -> bool:
    """Whether the allocator is foretold to need no more than the budget of ``plan``."""
    return excess(trace, plan, hardware.allocator) <= 0


def _with(hardware: HardwareProfile, margin: float) -> HardwareProfile:
    return replace(hardware, allocator=replace(hardware.allocator, margin_fraction=margin))
