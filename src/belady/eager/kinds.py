"""One kind of iteration: how far belady has come with it, and how a plan is made and corrected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from belady.eager.key import Key
from belady.eager.planned import Planned
from belady.eager.replay import Recipes
from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.trace import Trace
from belady.measure.calls import compiled_anything
from belady.measure.monitor import Sample, summarize
from belady.measure.stages import Policy, Stage
from belady.measure.verification import VERIFIED, Trial, Verification, best, verified
from belady.memory.cap import make_room
from belady.memory.carrier import Carrier
from belady.planners import POLICIES


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
        self._verification = Verification(policy, hardware)
        self.notes = self._verification.notes
        self._replays = True
        self._hardware = hardware
        self._carrier = carrier
        self._persistent = persistent
        self._fallback = fallback

    def may_replay(self) -> bool:
        """Whether values may be recomputed: all calls are seen, and none came out otherwise.

        Not among processes: the others would go on with gradients that one of them finds wrong.
        Nor where the policy does not: trials take memory, and a library that finds too little of
        it takes another algorithm from then on.
        """
        among_others = torch.distributed.is_available() and torch.distributed.is_initialized()
        wanted = self._replays and POLICIES[self.policy.name].recomputes
        return wanted and not among_others and not compiled_anything()

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
        self._put_in_force(kind, trace, self._verification.first(trace, *kind.numerics))

    def iteration_ended(self, kind: Kind, sample: Sample, peak_bytes: int) -> None:
        """An iteration under the plan ended; ``peak_bytes`` is 0 unless it was watched."""
        kind.peak_bytes = max(kind.peak_bytes, peak_bytes)
        if kind.stage is Stage.SETTLING:
            kind.stage = Stage.VERIFYING
        elif kind.stage is Stage.VERIFYING:
            kind.samples.append(sample)
            if len(kind.samples) == VERIFIED:
                self._verify(kind)

    def _verify(self, kind: Kind) -> None:
        """Keep the plan, or put another in force."""
        if kind.current is None or kind.trace is None:
            return
        defaults = kind.engine.defaults if kind.engine is not None else {}
        measured = summarize(kind.samples, kind.peak_bytes, tuple(sorted(defaults.items())))
        kind.current = verified(kind.current, measured, kind.samples)
        kind.tried.append(kind.current)
        kind.stage = Stage.STEADY
        kind.trace, better = self._verification.better(
            kind.trace, kind.tried, kind.samples, *kind.numerics
        )
        if better is not None:
            self._put_in_force(kind, kind.trace, better)
            return
        chosen = best(kind.tried)
        if chosen is not kind.current:
            self._put_in_force(kind, kind.trace, chosen)
            kind.stage = Stage.STEADY

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
        make_room(self._carrier.device, trial.room(verdict.peak_bytes))
