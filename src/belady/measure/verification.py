"""Plans that are corrected by what was measured under them: shared by the engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Phase, Tier, Trace
from belady.measure.monitor import Sample
from belady.measure.stages import Policy
from belady.planners import plan as make_plan
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# Iterations measured under a new plan, after one that only settles the allocator.
VERIFIED = 2
REPLANS = 3
_HOST_AGREES = 0.95


@dataclass(frozen=True)
class Trial:
    """A plan, the machine as it was taken to be, and what was measured under it."""

    plan: Plan
    hardware: HardwareProfile
    measured: Measured | None = None

    def keeps(self) -> bool:
        """Whether what was measured kept to the budget."""
        m = self.measured
        return m is None or max(m.peak(Tier.DEVICE), m.reserved_bytes) <= (
            self.plan.budget.device_bytes
        )


class Verification:
    """Asks a policy for plans, and again where they did not go as predicted.

    Parameters
    ----------
    numerics
        What can change a bit besides the settings of a plan.

    Attributes
    ----------
    notes
        What a user should know of corrections, one sentence each.
    """

    def __init__(
        self, policy: Policy, hardware: HardwareProfile, numerics: tuple[str, ...] = ()
    ) -> None:
        self.notes: list[str] = []
        self._numerics = numerics
        self._policy = policy
        self._hardware = hardware

    def first(self, trace: Trace) -> Trial:
        """The plan to begin with.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        hardware = self._hardware
        try:
            return Trial(self._plan(self._policy.name, trace, hardware), hardware)
        except InfeasibleBudgetError as error:
            if self._policy.name != "auto":
                raise
            # The floor has just run within the cap, so it can go on without the stated margin.
            bare = replace(hardware.allocator, margin_fraction=0.0, margin_bytes=0)
            hardware = replace(hardware, allocator=bare)
            try:
                plan = self._plan("floor", trace, hardware)
            except InfeasibleBudgetError:
                raise error from None
            self.notes.append(f"the budget leaves no margin: {error}")
            return Trial(plan, hardware)

    def better(
        self, trace: Trace, tried: Sequence[Trial], samples: Sequence[Sample]
    ) -> tuple[Trace, Trial] | None:
        """The trace as it is now known, and the policy's plan for it; None if the last one stays.

        Memory is exact in bytes allocated. What the allocator reserves beyond them depends on how
        blocks fit; where that is more than the margin it flushes its cache, which costs time.

        Parameters
        ----------
        tried
            Plans that were measured, at least one.
        samples
            Of the iterations under the last of them.
        """
        last = tried[-1]
        if last.measured is None or len(tried) > REPLANS:
            return None
        corrected = with_host_of(trace, samples)
        hardware, why = _with_more_room(last, last.measured)
        if corrected is None and not why:
            return None
        trace = corrected or trace
        try:
            plan = self._plan(self._policy.name, trace, hardware)
        except InfeasibleBudgetError:
            return None
        if plan.decisions == last.plan.decisions:
            return None
        self.notes += why
        return trace, Trial(plan, hardware)

    def _plan(self, name: str, trace: Trace, hardware: HardwareProfile) -> Plan:
        # A trace of many ops takes seconds to plan, in which the script says nothing.
        budget = self._policy.budget
        size, room = (len(trace.ops), len(trace.saved)), format_bytes(budget.device_bytes)
        _log.info("planning %d ops, %d saved values, by %s within %s", *size, name, room)
        begun = perf_counter()
        plan = make_plan(name, trace, hardware, budget, exact=self._policy.exact)
        plan = replace(plan, numerics=(*plan.numerics, *self._numerics))
        _log.info(
            "planned by %s in %s: %s an iteration are predicted",
            plan.planner,
            format_seconds(perf_counter() - begun),
            format_seconds(plan.predicted_seconds),
        )
        return plan


def fastest(tried: Sequence[Trial]) -> Trial:
    """Of the plans that kept to the budget, or of all if none did, the one measured fastest."""
    return min(
        tried,
        key=lambda trial: (not trial.keeps(), trial.measured.seconds if trial.measured else 0),
    )


def with_host_of(trace: Trace, samples: Sequence[Sample]) -> Trace | None:
    """The trace with host seconds as unobserved iterations show them; None if they agree.

    Watching slows the host down, so the seconds of an observed iteration are upper bounds. What
    the host spent in the roots of an iteration that nobody watched is another: in a busy launch
    queue it contains waiting for the device. The smaller one holds.
    """
    if trace.device == "cpu":
        # The host runs the ops itself: its own share was measured apart.
        return None
    spent = min(sample.host_seconds for sample in samples)
    watched = sum(op.host_seconds for op in trace.ops if op.phase is Phase.FORWARD)
    if not 0 < spent < _HOST_AGREES * watched:
        return None
    share = spent / watched
    ops = tuple(replace(op, host_seconds=op.host_seconds * share) for op in trace.ops)
    return replace(trace, ops=ops)


def _with_more_room(trial: Trial, measured: Measured) -> tuple[HardwareProfile, list[str]]:
    """The machine with a margin for what was seen, and why it is another one."""
    allocator, why = trial.hardware.allocator, []
    if measured.allocation_retries:
        before, fraction = allocator.margin_fraction, allocator.margin_fraction * 1.5 + 0.02
        allocator = replace(allocator, margin_fraction=fraction)
        why.append(
            f"under a margin of {before:.0%} the allocator had to flush its cache: tried "
            f"{fraction:.0%}"
        )
    peak, predicted = measured.peak(Tier.DEVICE), trial.plan.predicted_peak_bytes
    budget = trial.plan.budget.device_bytes
    if peak > predicted and trial.hardware.allocator.budget_for(peak) > budget:
        allocator = replace(allocator, margin_bytes=allocator.margin_bytes + peak - predicted)
        why.append(
            f"a peak of {format_bytes(peak)} was measured and {format_bytes(predicted)} were "
            "predicted: tried with a margin larger by the difference"
        )
    return replace(trial.hardware, allocator=allocator), why
