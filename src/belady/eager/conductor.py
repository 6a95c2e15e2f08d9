"""What each iteration does next: observe it, plan it, verify the plan, or simply run it.

A *kind* of iteration is named by its first pass. Every kind is observed twice at the floor (the
first iteration of a process times library start-up, and creates optimizer state), then planned,
then verified, then left alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import torch

from belady.eager.immediate import Immediate, leaving
from belady.eager.iteration import Iteration
from belady.eager.key import Key
from belady.eager.planned import Planned
from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Plan
from belady.ir.run import Run
from belady.ir.timeline import Measured
from belady.ir.trace import Tier, Trace
from belady.measure.clock import NoClock, clock_for
from belady.measure.monitor import Monitor, Sample, summarize
from belady.measure.observation import Observation
from belady.memory.carrier import Carrier
from belady.planners import plan as make_plan
from belady.planners.moves import MIN_BYTES
from belady.simulate import simulate

# Iterations measured under a new plan, after one that only settles the allocator.
_VERIFIED = 2
_REPLANS = 3
_DEVIATIONS = 2


class Stage(StrEnum):
    """How far a kind of iteration has come."""

    WARM = "warm-up"
    TIMED = "observed"
    SETTLING = "first planned"
    VERIFYING = "verified"
    STEADY = "steady"


@dataclass
class Kind:
    """One kind of iteration and what is known of it."""

    stage: Stage = Stage.WARM
    passes: tuple[Key, ...] = ()
    trace: Trace | None = None
    plan: Plan | None = None
    engine: Planned | None = None
    peak_bytes: int = 0
    samples: list[Sample] = field(default_factory=list)
    measured: Measured | None = None
    deviations: int = 0
    replans: int = 0


@dataclass(frozen=True)
class Policy:
    """What the user asked for."""

    name: str
    budget: Budget
    exact: bool = False


class Conductor:
    """Starts and ends iterations on one device.

    Parameters
    ----------
    hardware
        The machine; its allocator margin grows where a verified iteration needs more.
    carrier
        Moves bytes.
    modules
        The roots.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        carrier: Carrier,
        modules: list[torch.nn.Module],
    ) -> None:
        self.policy = policy
        self.hardware = hardware
        self.carrier = carrier
        self.notes: list[str] = []
        self._modules = modules
        self._monitor = Monitor(carrier.device, carrier)
        self._kinds: dict[Key, Kind] = {}
        self._persistent: set[int] = set()
        tiers = tuple(t for t in (Tier.HOST, Tier.DISK) if hardware.capacity(t) > 0)
        self.floor = Immediate(leaving(carrier), tiers or (Tier.DISK,), self._persistent, MIN_BYTES)
        self.latest: Kind | None = None

    def start(self, key: Key) -> Iteration:
        """Begin an iteration whose first pass is of kind ``key``."""
        kind = self._kinds.setdefault(key, Kind())
        self.latest = kind
        if kind.plan is None or kind.engine is not None:
            # Addresses of storages can change between iterations (`.to`, a swapped `.data`).
            self._persistent.clear()
            self._persistent.update(_addresses(self._modules))
        observation = self._observation(kind)
        engine = kind.engine if kind.plan is not None else None
        if engine is not None and observation is not None:
            recorder = observation.recorder
            engine.on_bring = lambda content: (
                recorder.brought(content, content.arrival.tensor)
                if content.arrival is not None
                else None
            )
        elif engine is not None:
            engine.on_bring = None
        expected = kind.passes if kind.plan is not None else ()
        iteration = Iteration(self.floor, engine, expected, observation)
        iteration.begin(self._monitor, level=int(kind.stage is not Stage.STEADY))
        return iteration

    def finish(
        self, iteration: Iteration, optimizer: torch.optim.Optimizer | None
    ) -> tuple[Stage, Sample]:
        """End an iteration and decide what the next one of its kind does."""
        kind = self._kinds[iteration.passes[0]]
        stage = kind.stage
        sample, trace = iteration.finish(optimizer)
        passes = tuple(iteration.passes)
        if kind.plan is None:
            self._observed(kind, passes, trace)
        elif passes != kind.passes:
            self._deviated(kind)
        else:
            kind.deviations = 0
            self._planned(kind, iteration, sample)
        return stage, sample

    def run(self, versions: tuple[tuple[str, str], ...]) -> Run | None:
        """Everything known of the latest planned kind of iteration, or None."""
        kind = self.latest
        if kind is None or kind.trace is None or kind.plan is None:
            planned = [k for k in self._kinds.values() if k.plan is not None]
            if not planned:
                return None
            kind = planned[-1]
        if kind.trace is None or kind.plan is None:
            return None
        predicted = simulate(kind.trace, self.hardware, kind.plan)
        return Run(
            kind.trace,
            self.hardware,
            kind.plan,
            predicted,
            kind.measured,
            tuple(self.notes),
            versions,
        )

    @property
    def verified(self) -> bool | None:
        """Whether measured peaks kept to the budget; None before anything was verified."""
        done = [k.measured for k in self._kinds.values() if k.measured is not None]
        if not done:
            return None
        budget = self.policy.budget.device_bytes
        return all(max(m.peak(Tier.DEVICE), m.reserved_bytes) <= budget for m in done)

    # -- one step of a kind ------------------------------------------------------------------

    def _observation(self, kind: Kind) -> Observation | None:
        device = self.carrier.device
        if kind.stage in (Stage.WARM, Stage.TIMED):
            return Observation(device, clock_for(device), self._modules)
        if kind.stage is Stage.SETTLING and device.type == "cpu":
            # A CPU has no allocator that counts: the peak is seen by watching storages.
            return Observation(device, NoClock(), self._modules)
        return None

    def _observed(self, kind: Kind, passes: tuple[Key, ...], trace: Trace | None) -> None:
        if kind.stage is Stage.WARM or trace is None or passes != kind.passes:
            kind.stage, kind.passes = Stage.TIMED, passes
            return
        self._replan(kind, trace)

    def _deviated(self, kind: Kind) -> None:
        """Passes came in another order: once is a skipped step, more often another program."""
        kind.deviations += 1
        if kind.deviations >= _DEVIATIONS:
            kind.stage, kind.plan, kind.engine = Stage.WARM, None, None
            kind.deviations = 0

    def _planned(self, kind: Kind, iteration: Iteration, sample: Sample) -> None:
        if kind.stage is Stage.SETTLING:
            if iteration.observation is not None:
                rounding = self.hardware.allocator.round_bytes
                kind.peak_bytes = iteration.observation.peak_bytes(rounding)
            kind.stage = Stage.VERIFYING
        elif kind.stage is Stage.VERIFYING:
            kind.samples.append(sample)
            if len(kind.samples) == _VERIFIED:
                self._verify(kind)

    def _verify(self, kind: Kind) -> None:
        defaults = kind.engine.defaults if kind.engine is not None else {}
        kind.measured = summarize(kind.samples, kind.peak_bytes, tuple(sorted(defaults.items())))
        kind.stage = Stage.STEADY
        short = kind.measured.allocation_retries > 0
        if short and kind.replans < _REPLANS and kind.trace is not None:
            kind.replans += 1
            allocator = self.hardware.allocator
            wider = replace(allocator, margin_fraction=allocator.margin_fraction * 1.5 + 0.01)
            self.notes.append(
                f"the allocator had to flush its cache under the plan: margin raised to "
                f"{wider.margin_fraction:.3f} and planned again"
            )
            self.hardware = replace(self.hardware, allocator=wider)
            self._replan(kind, kind.trace)

    def _replan(self, kind: Kind, trace: Trace) -> None:
        kind.trace = trace
        kind.plan = self._best_plan(trace)
        verdict = check(trace, self.hardware, kind.plan, kind.plan.budget)
        kind.engine = None
        if not kind.plan.moves_nothing:
            self.carrier.reserve(verdict.host_bytes)
            kind.engine = Planned(trace, kind.plan, self.carrier, self._persistent)
        kind.samples = []
        kind.stage = Stage.SETTLING
        if self.carrier.device.type == "cuda":
            # Blocks cut for the floor would fragment the plan's memory.
            torch.cuda.empty_cache()

    def _best_plan(self, trace: Trace) -> Plan:
        policy = self.policy
        try:
            return make_plan(policy.name, trace, self.hardware, policy.budget, exact=policy.exact)
        except InfeasibleBudgetError as error:
            if policy.name != "auto":
                raise
            # The floor has just run within the cap, so it can go on without the stated margin.
            bare = replace(self.hardware.allocator, margin_fraction=0.0, margin_bytes=0)
            hardware = replace(self.hardware, allocator=bare)
            try:
                plan = make_plan("floor", trace, hardware, policy.budget)
            except InfeasibleBudgetError:
                raise error from None
            self.hardware = hardware
            self.notes.append(f"the budget leaves no margin: {error}")
            return plan


def _addresses(modules: Iterable[torch.nn.Module]) -> Iterable[int]:
    for module in modules:
        for parameter in module.parameters():
            yield parameter.untyped_storage()._cdata
        for buffer in module.buffers():
            yield buffer.untyped_storage()._cdata
