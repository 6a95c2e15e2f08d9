"""Plans that are corrected by what was measured under them: shared by the engines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from time import perf_counter

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Tier, Trace
from belady.measure.corrections import (
    MARGIN_AT_LEAST,
    with_device_of,
    with_gap_of,
    with_host_of,
    with_issue_of,
    with_links_of,
    with_peak_of,
)
from belady.measure.kernels import ITS_OWN, Kernels
from belady.measure.margins import Make, roomy, stated, suited, towards, with_settled
from belady.measure.monitor import Sample
from belady.measure.pacing import with_pace_of
from belady.measure.stages import Policy
from belady.measure.tightening import tightened
from belady.measure.trial import Trial, best, fastest, margin, why
from belady.measure.unissued import for_launches, launching, small_bytes, unissued
from belady.planners import plan as make_plan
from belady.planners import traits_of
from belady.planners.price import KEPT, price
from belady.simulate import simulate
from belady.simulate.blocks import excess
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# Iterations measured under a new plan, after one that only settles the allocator.
VERIFIED = 2
_REPLANS = 3


class Verification:
    """Asks a policy for plans, and again where they did not go as predicted.

    Parameters
    ----------
    kernels
        Those of iterations under a plan.

    Attributes
    ----------
    notes
        What a user should know of corrections, one sentence each.
    """

    def __init__(
        self, policy: Policy, hardware: HardwareProfile, kernels: Kernels = ITS_OWN
    ) -> None:
        self.notes: list[str] = []
        self._policy = policy
        self._hardware = hardware
        self._kernels = kernels
        self._starved = False

    def first(self, trace: Trace, *numerics: str) -> Trial:
        """The plan to begin with.

        Parameters
        ----------
        numerics
            What can change a bit besides the settings of the plan.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        name = self._policy.name
        make = self._planner(name, trace, numerics)
        if not traits_of(name).fills:
            return Trial(make(self._hardware), self._hardware, name)
        hardware = with_settled(trace, self._hardware, name)
        try:
            return Trial(*roomy(trace, hardware, make), name)
        except InfeasibleBudgetError as error:
            if name != "auto":
                raise
            return self._with_less_margin(trace, hardware, numerics, error)

    def _with_less_margin(
        self,
        trace: Trace,
        hardware: HardwareProfile,
        numerics: tuple[str, ...],
        error: InfeasibleBudgetError,
    ) -> Trial:
        """A plan for a budget without room for the stated margin, which the floor has just run in.

        Half of the room that there is goes to the margin. No convolution is computed again: with
        memory that scarce, cuDNN may not get the workspace of the algorithm that it took before. Of
        plans whose blocks are foretold to need more than there is the floor is the one that ran.
        """
        budget = self._policy.budget.device_bytes
        peak = hardware.allocator.peak_within(error.smallest_bytes)
        stated = hardware.allocator.margin_fraction
        half = min(stated, hardware.allocator.fraction_of(peak, budget) / 2)
        found: list[tuple[float, Trial]] = []
        for name in ("hybrid_cheap", "floor"):
            fraction = 0.0 if name == "floor" else max(half, 0.0)
            tight = replace(hardware.allocator, margin_fraction=fraction, margin_bytes=0)
            tight_hardware = replace(hardware, allocator=tight)
            try:
                plan = self._plan(name, trace, tight_hardware, numerics)
            except InfeasibleBudgetError:
                continue
            over = excess(trace, plan, tight)
            if name == "floor" or fraction >= MARGIN_AT_LEAST or (fraction > 0 and over <= 0):
                seconds = price(plan.predicted_seconds, over, KEPT)
                found.append((seconds, Trial(plan, tight_hardware, name)))
            if found and over <= 0:
                break
        if not found:
            raise error
        _, best = min(found, key=itemgetter(0))
        left = best.hardware.allocator.margin_fraction
        self._tell(f"the budget leaves a margin of {left:.0%}: {error}")
        return best

    def verified(
        self, trial: Trial, trace: Trace, measured: Measured, samples: Sequence[Sample]
    ) -> Trial:
        """The trial with what was measured, on the machine as it showed itself."""
        _log.info(
            "measured %s an iteration; flushes of the allocator's cache: %d",
            format_seconds(measured.seconds),
            measured.allocation_retries,
        )
        hardware = trial.hardware
        hardware = with_issue_of(hardware, trial.plan, samples, self._hardware) or hardware
        trace = self._as_run(trace, trial.plan, hardware, samples)
        hardware = with_links_of(trace, trial.plan, hardware, samples) or hardware
        return replace(trial, hardware=hardware, measured=measured)

    def chosen(
        self, trace: Trace, tried: Sequence[Trial], samples: Sequence[Sample], *numerics: str
    ) -> tuple[Trace, Trial]:
        """The trace as it is now known, and what goes on: a plan that is `better`, or the best."""
        trace, better = self.better(trace, tried, samples, *numerics)
        found = better or best(tried)
        if better is None and found is not tried[-1]:
            about, flushed = margin(found)
            flushes = ", although the allocator flushes its cache under it" if flushed else ""
            self._tell(
                f"the plan under a margin of {about:.0%} was the fastest{flushes}: it goes on"
            )
        return trace, found

    def better(
        self, trace: Trace, tried: Sequence[Trial], samples: Sequence[Sample], *numerics: str
    ) -> tuple[Trace, Trial | None]:
        """The trace as it is now known, and the policy's plan for it; None if the last one stays.

        Memory is exact in bytes allocated. What the allocator reserves beyond them depends on how
        blocks fit; where that is more than the margin it flushes its cache, which costs time.

        Parameters
        ----------
        tried
            Plans that were measured, at least one.
        samples
            Of the iterations under the last of them.
        numerics
            As in `first`.
        """
        last = tried[-1]
        plan, hardware, measured = last.plan, last.hardware, last.measured
        if measured is None or len(tried) > _REPLANS:
            return trace, None
        trace = self._as_run(trace, plan, hardware, samples)
        trace = with_device_of(trace, plan, hardware, samples) or trace
        predicted = simulate(trace, hardware, plan)
        # Of workspaces the trace can know more than when the plan was made.
        plan = replace(plan, predicted_peak_bytes=predicted.peak(Tier.DEVICE))
        others = [margin(trial) for trial in tried[:-1]]
        gap = with_gap_of(trace, plan, hardware.allocator, measured, others)
        peak = with_peak_of(plan, gap or hardware.allocator, measured)
        allocator = peak or gap
        if allocator is None and predicted.seconds == plan.predicted_seconds:
            return trace, None
        hardware = replace(hardware, allocator=allocator or hardware.allocator)
        make = self._planner(last.policy, trace, numerics)
        found = towards(trace, last.hardware.allocator.margin_fraction, hardware, make)
        if found is None:
            return trace, None
        made, hardware = found
        if (made.decisions, made.workspace) == (plan.decisions, plan.workspace):
            return trace, None
        if peak is None and made.predicted_seconds >= fastest(tried):
            return trace, None
        self._tell(*why(replace(last, plan=plan), measured, hardware, higher=peak is not None))
        return trace, Trial(made, hardware, last.policy)

    def launched(
        self,
        trace: Trace,
        trial: Trial,
        beside_bytes: int,
        *numerics: str,
        packed: bool = False,
    ) -> tuple[Trace, Trial]:
        """The trace, and the plan for it, of an iteration that is launched as it was captured.

        Parameters
        ----------
        packed
            Whether its blocks are packed.

        Raises
        ------
        InfeasibleBudgetError
            If no plan leaves ``beside_bytes`` of the budget.
        """
        # It runs once as it is issued, and may run out of memory as one before has.
        probed = trial.hardware if self._starved else self._hardware
        packed_bytes = packed * self._policy.budget.device_bytes
        beside_bytes += small_bytes(trace, packed_bytes)
        hardware = launching(trial.hardware, probed, beside_bytes, packed_bytes)
        trace = unissued(trace)
        make = self._planner(trial.policy, trace, numerics)
        ways = (suited, roomy) if traits_of(trial.policy).fills else (stated, stated)
        asks = [partial(way, trace, make=make) for way in ways]
        seams = self._kernels.seams(trace)
        return trace, Trial(*for_launches(trace, hardware, seams, *asks), trial.policy)

    def tighter(self, trace: Trace, tried: Sequence[Trial], *numerics: str) -> Trial | None:
        """What to go on with where the device ran out of memory under the last of ``tried``.

        None where nothing takes less.
        """
        self._starved = True
        last, measured = tried[-1], [trial.measured for trial in tried]

        def make(name: str, hardware: HardwareProfile) -> Plan:
            return self._plan(name, trace, hardware, numerics)

        found = tightened(trace, last.plan, last.hardware, measured, make, last.policy)
        if found is None:
            return None
        self._tell(found.note)
        return Trial(found.plan, found.hardware, found.policy)

    def _as_run(
        self, trace: Trace, plan: Plan, hardware: HardwareProfile, samples: Sequence[Sample]
    ) -> Trace:
        """The trace with the times of ops as iterations under the plan show them."""
        trace = with_host_of(trace, samples) or trace
        return with_pace_of(trace, plan, hardware, samples, self._kernels.made) or trace

    def _tell(self, *notes: str) -> None:
        self.notes += notes
        for note in notes:
            _log.info("%s", note)

    def _planner(self, name: str, trace: Trace, numerics: tuple[str, ...]) -> Make:
        return lambda hardware: self._plan(name, trace, hardware, numerics)

    def _plan(
        self, name: str, trace: Trace, hardware: HardwareProfile, numerics: tuple[str, ...]
    ) -> Plan:
        # A trace of many ops takes seconds to plan, in which the script says nothing.
        budget = self._policy.budget
        size, room = (len(trace.ops), len(trace.saved)), format_bytes(budget.device_bytes)
        _log.info("planning %d ops, %d saved values, by %s within %s", *size, name, room)
        begun = perf_counter()
        plan = make_plan(name, trace, hardware, budget, exact=self._policy.exact)
        plan = self._kernels.fitted(trace, hardware, plan)
        plan = replace(plan, numerics=(*plan.numerics, *numerics))
        _log.info(
            "planned by %s in %s: %s an iteration are predicted",
            plan.planner,
            format_seconds(perf_counter() - begun),
            format_seconds(plan.predicted_seconds),
        )
        return plan
