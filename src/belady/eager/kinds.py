"""One kind of iteration: how far belady has come with it, and how a plan is made and corrected."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch

from belady.eager.corrections import with_gap_of, with_host_of
from belady.eager.key import Key
from belady.eager.planned import Planned
from belady.eager.replay import Recipes
from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Trace
from belady.measure.calls import compiled_anything
from belady.measure.monitor import Sample, summarize
from belady.measure.stages import Policy, Stage
from belady.memory.cap import set_aside
from belady.memory.carrier import Carrier
from belady.planners import plan as make_plan
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# Iterations measured under a new plan, after one that only settles the allocator.
_VERIFIED = 2
_REPLANS = 3


@dataclass(frozen=True)
class Trial:
    """A plan, the machine as it was taken to be, and what was measured under it."""

    plan: Plan
    hardware: HardwareProfile
    measured: Measured | None = None


@dataclass
class Kind:
    """One kind of iteration and what is known of it.

    Attributes
    ----------
    passes
        Keys of its passes, in order.
    warm
        Trace of its first iteration.
    recipes
        How its ops are run again.
    varying
        Calls of the program whose numbers change from iteration to iteration.
    current
        The plan in force; None while it is observed.
    tried
        Plans that were measured.
    peak_bytes
        Device peak of a watched iteration under the plan, where no allocator counts it.
    deviations
        Iterations in a row whose passes or saves were others.
    observed
        Iterations observed so far.
    numerics
        What can change a bit besides the settings of a plan.
    """

    stage: Stage = Stage.WARM
    passes: tuple[Key, ...] = ()
    warm: Trace | None = None
    trace: Trace | None = None
    recipes: Recipes = field(default_factory=Recipes)
    varying: set[tuple[int, int]] = field(default_factory=set)
    current: Trial | None = None
    engine: Planned | None = None
    tried: list[Trial] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    peak_bytes: int = 0
    deviations: int = 0
    observed: int = 0
    numerics: tuple[str, ...] = ()

    def observe_again(self) -> None:
        """Forget plan and trace: the program has changed."""
        self.stage, self.current, self.engine, self.deviations = Stage.WARM, None, None, 0
        self.tried = []


class Planning:
    """Plans a kind of iteration, and corrects the plan by what was measured under it.

    Parameters
    ----------
    persistent
        Addresses of parameters and buffers, kept up to date by the owner.
    fallback
        Saves what cannot be recomputed after all.

    Attributes
    ----------
    notes
        What a user should know of corrections, one sentence each.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        carrier: Carrier,
        persistent: set[int],
        fallback: Callable[[torch.Tensor], Any],
    ) -> None:
        self.policy = policy
        self.notes: list[str] = []
        self._replays = True
        self._hardware = hardware
        self._carrier = carrier
        self._persistent = persistent
        self._fallback = fallback

    def may_replay(self) -> bool:
        """Whether values may be recomputed: all calls are seen, and none came out otherwise.

        Not among processes: the others would go on with gradients that one of them finds wrong.
        """
        among_others = torch.distributed.is_available() and torch.distributed.is_initialized()
        return self._replays and not among_others and not compiled_anything()

    def check_replays(self, kind: Kind) -> None:
        """Observe a kind again that may not go on with what its plan recomputes."""
        engine = kind.engine
        if engine is None or engine.calls is None:
            return
        self._replays = self._replays and not engine.digests.refuted
        if not self.may_replay():
            kind.observe_again()

    def plan(self, kind: Kind, trace: Trace, recipes: Recipes) -> None:
        """Make the first plan.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        kind.trace, kind.recipes = trace, recipes
        self._put_in_force(kind, trace, self._first(kind, trace))

    def iteration_ended(self, kind: Kind, sample: Sample, peak_bytes: int) -> None:
        """An iteration under the plan ended; ``peak_bytes`` is 0 unless it was watched."""
        kind.peak_bytes = max(kind.peak_bytes, peak_bytes)
        if kind.stage is Stage.SETTLING:
            kind.stage = Stage.VERIFYING
        elif kind.stage is Stage.VERIFYING:
            kind.samples.append(sample)
            if len(kind.samples) == _VERIFIED:
                self._verify(kind)

    def _verify(self, kind: Kind) -> None:
        """Keep the plan, or try one that leaves the allocator more room.

        Memory is exact in bytes allocated. What the allocator reserves beyond them depends on how
        blocks fit; where that is more than the margin it flushes its cache, which costs time. Of
        the plans tried that do not flush it, the one measured fastest stays.
        """
        if kind.current is None or kind.trace is None:
            return
        defaults = kind.engine.defaults if kind.engine is not None else {}
        measured = summarize(kind.samples, kind.peak_bytes, tuple(sorted(defaults.items())))
        kind.current = replace(kind.current, measured=measured)
        kind.tried.append(kind.current)
        kind.stage = Stage.STEADY
        better = None
        if len(kind.tried) <= _REPLANS:
            better = self._better(kind, kind.trace, kind.current, measured)
        if better is not None:
            self._put_in_force(kind, kind.trace, better)
            return
        fastest = min(kind.tried, key=_preference)
        if fastest is not kind.current:
            self._put_in_force(kind, kind.trace, fastest)
            kind.stage = Stage.STEADY

    def _better(self, kind: Kind, trace: Trace, trial: Trial, measured: Measured) -> Trial | None:
        """The policy's plan with what was learned; None when that is the same plan."""
        corrected = with_host_of(trace, trial.plan, trial.hardware, kind.samples)
        allocator = with_gap_of(trace, trial.plan, trial.hardware.allocator, measured)
        if corrected is None and allocator is None:
            return None
        if corrected is not None:
            trace = kind.trace = corrected
        hardware = trial.hardware
        if allocator is not None:
            hardware = replace(hardware, allocator=allocator)
        try:
            plan = self._make(kind, trace, hardware)
        except InfeasibleBudgetError:
            return None
        if plan.decisions == trial.plan.decisions:
            return None
        if measured.allocation_retries:
            self.notes.append(
                f"under a margin of {trial.hardware.allocator.margin_fraction:.0%} the allocator "
                f"had to flush its cache: tried {hardware.allocator.margin_fraction:.0%}"
            )
        return Trial(plan, hardware)

    def _first(self, kind: Kind, trace: Trace) -> Trial:
        try:
            return Trial(self._make(kind, trace, self._hardware), self._hardware)
        except InfeasibleBudgetError as error:
            if self.policy.name != "auto":
                raise
            # The floor has just run within the cap, so it can go on without the stated margin.
            bare = replace(self._hardware.allocator, margin_fraction=0.0, margin_bytes=0)
            hardware = replace(self._hardware, allocator=bare)
            try:
                plan = self._make(kind, trace, hardware, "floor")
            except InfeasibleBudgetError:
                raise error from None
            self.notes.append(f"the budget leaves no margin: {error}")
            return Trial(plan, hardware)

    def _make(
        self, kind: Kind, trace: Trace, hardware: HardwareProfile, name: str | None = None
    ) -> Plan:
        policy = self.policy
        name = name or policy.name
        # A trace of many ops takes seconds to plan, in which the script says nothing.
        size, room = (len(trace.ops), len(trace.saved)), format_bytes(policy.budget.device_bytes)
        _log.info("planning %d ops, %d saved values, by %s within %s", *size, name, room)
        begun = perf_counter()
        plan = make_plan(name, trace, hardware, policy.budget, exact=policy.exact)
        plan = replace(plan, numerics=(*plan.numerics, *kind.numerics))
        _log.info(
            "planned by %s in %s: %s an iteration are predicted",
            plan.planner,
            format_seconds(perf_counter() - begun),
            format_seconds(plan.predicted_seconds),
        )
        return plan

    def _put_in_force(self, kind: Kind, trace: Trace, trial: Trial) -> None:
        verdict = check(trace, trial.hardware, trial.plan, trial.plan.budget)
        kind.current, kind.engine = trial, None
        if not trial.plan.moves_nothing:
            self._carrier.reserve(verdict.host_bytes)
            plan, carrier = trial.plan, self._carrier
            kind.engine = Planned(
                trace, plan, carrier, self._persistent, kind.recipes, self._fallback
            )
        kind.samples, kind.peak_bytes = [], 0
        kind.stage = Stage.SETTLING
        if self._carrier.device.type == "cuda":
            # Blocks cut for the plan before would fragment this one's memory.
            torch.cuda.empty_cache()
            if kind.engine is not None:
                share = 1 + trial.hardware.allocator.margin_fraction
                set_aside(self._carrier.device, int(verdict.peak_bytes * share))


def _preference(trial: Trial) -> tuple[bool, float]:
    """Plans under which the allocator had room come first, then the faster ones."""
    measured = trial.measured
    return (bool(measured.allocation_retries), measured.seconds) if measured else (True, 0.0)
