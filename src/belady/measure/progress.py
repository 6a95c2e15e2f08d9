"""How far an engine has come with one kind of iteration: the same for all engines.

A kind is observed twice at the floor (the first iteration of a process times library start-up, and
creates optimizer state), then planned; the plan settles in one iteration, or in two where it asks
convolutions for less workspace, in one more shows how fast kernels are that nobody has watched, is
verified in the next ones, and is then left alone, or corrected and verified again. Where a steady
plan loses time to the allocator it is verified once more: what was measured of it holds no longer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from belady.ir.legality import check
from belady.ir.plan import Workspace
from belady.ir.run import Run
from belady.ir.timeline import Measured
from belady.ir.trace import Trace
from belady.measure.algorithms import with_beside
from belady.measure.events import with_events
from belady.measure.monitor import Sample, summarize
from belady.measure.room import claimed, piece_for
from belady.measure.stages import Stage
from belady.measure.tightening import NOTHING
from belady.measure.trial import Trial
from belady.measure.unrest import Asks, Unrest
from belady.measure.verification import VERIFIED, Verification
from belady.memory.carrier import Carrier
from belady.memory.paging import Claim
from belady.memory.piece import Piece
from belady.planners.workspace import as_run
from belady.simulate import simulate

_log = logging.getLogger("belady")

# Iterations in a row that went otherwise than planned, after which a kind is observed again.
_DEVIATIONS = 2
# Iterations observed of one kind before it is left at the floor.
_OBSERVED = 12
# Most iterations that show nothing of a plan, since the allocator flushed its cache in them.
_FLUSHED = 2


@dataclass
class Progress:
    """How far an engine has come with one kind of iteration; engines add what they need to know.

    Attributes
    ----------
    trial
        The plan in force, with what was measured under it; None while the kind is observed.
    tried
        Plans that were measured.
    begun
        Whether an iteration has gone as the plan in force says.
    samples
        Of the iterations that verify the plan in force.
    paced
        Of the one before them that showed how fast kernels are.
    unwatched
        Whether kernels under a plan are others than those that were watched.
    peak_bytes
        Device peak of a watched iteration under the plan, where no allocator counts it.
    deviations
        Iterations in a row that went otherwise than planned.
    observed
        Iterations observed so far.
    claim
        What the plan in force needs of managed memory.
    flushed
        Iterations under the plan in force that verified nothing, see `_FLUSHED`.
    starved
        Whether the device ran out of memory in the last iteration.
    piece
        What the plan in force takes its blocks from.
    unrest
        What steady iterations ask for.
    """

    stage: Stage = Stage.WARM
    trial: Trial | None = None
    tried: list[Trial] = field(default_factory=list)
    begun: bool = False
    samples: list[Sample] = field(default_factory=list)
    paced: list[Sample] = field(default_factory=list)
    unwatched: bool = False
    peak_bytes: int = 0
    deviations: int = 0
    observed: int = 0
    claim: Claim | None = None
    flushed: int = 0
    starved: bool = False
    piece: Piece = field(default_factory=partial(Piece, torch.device("cpu"), 0))
    unrest: Unrest = field(default_factory=Unrest)

    @property
    def issued(self) -> bool:
        """Whether steady iterations are issued op by op, as those that verify a plan are."""
        return True

    @property
    def watched(self) -> bool:
        """Whether the next iteration is observed."""
        return self.stage in (Stage.WARM, Stage.TIMED)

    @property
    def shows_beside(self) -> bool:
        """Whether the next iteration shows what convolutions take beside, if it is observed."""
        # In the first under a plan that asks for less workspace cuDNN still makes its choices.
        return self.stage is Stage.SETTLING and self.begun and self._leaner

    @property
    def _verifying(self) -> Stage:
        return Stage.PACED if self.unwatched else Stage.VERIFYING

    @property
    def _leaner(self) -> bool:
        return self.trial is not None and self.trial.plan.workspace is Workspace.MEMORY

    @property
    def measured(self) -> Measured | None:
        """What was measured under the plan in force."""
        return None if self.trial is None else self.trial.measured

    def level(self, *, recording: bool) -> int:
        """How much of the next iteration is measured: 0 time, 1 peaks and bytes too, 2 events."""
        if self.stage is not Stage.STEADY:
            return 1
        return 2 if self.trial is not None and (recording or self.unrest.record) else 0

    def seen(self, *, alike: bool, usable: bool = True) -> bool:
        """Count an iteration that was observed; whether it is time to plan.

        ``alike`` says whether it went as the one before, ``usable`` whether the next can be
        compared with it.
        """
        self.observed += 1
        if self.stage is Stage.TIMED and alike:
            return True
        if self.observed >= _OBSERVED:
            self.stage = Stage.STEADY  # no two alike: it stays at the floor, which needs no plan
        else:
            self.stage = Stage.TIMED if usable else Stage.WARM
        return False

    def begin(self, trial: Trial, trace: Trace, carrier: Carrier) -> None:
        """Put a plan in force; one that was measured before settles, and is not verified again.

        Raises
        ------
        PlanMismatchError
            If it was made for another trace.
        TierFullError, TierError
            If host memory, or managed memory, is not to be had.
        """
        verdict = check(trace, trial.hardware, trial.plan, trial.plan.budget)
        before, self.claim = self.claim, claimed(trial, trace, carrier)
        if before is not None:
            before.close()
        self.piece.close()
        self.piece = piece_for(trial, trace, verdict.peak_bytes, carrier)
        self.trial, self.begun = trial, False
        self.samples, self.paced = [], []
        self.peak_bytes = self.flushed = 0
        self.stage = Stage.SETTLING
        self.unrest.settles()

    def went_otherwise(self) -> None:
        """Count an iteration that did not go as planned; after some, the kind is observed again."""
        self.deviations += 1
        if self.deviations >= _DEVIATIONS and self.observed < _OBSERVED:
            self.observe_again()

    def went_as_planned(self, sample: Sample, peak_bytes: int = 0) -> bool:
        """Count an iteration that did, watched if it has a peak; whether the plan is verified."""
        self.deviations = 0
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if self.stage is Stage.STEADY and self.issued:
            self._heed(sample)
        shown = self.stage in (Stage.PACED, Stage.VERIFYING)
        flushed = shown and sample.retries > 0 and self.flushed < _FLUSHED
        self.piece.went(flushed=flushed)
        if self.stage is Stage.SETTLING:
            known = self.measured is not None
            if self.begun or known or not self._leaner:
                # Libraries that tried algorithms have left memory in pieces that no later
                # iteration has a use for.
                self.piece.clear()
                self.stage = Stage.STEADY if known else self._verifying
            self.begun = True
        elif flushed:
            self.samples, self.flushed = [], self.flushed + 1
        elif self.stage is Stage.PACED:
            self.paced = [] if sample.retries else [sample]
            self.stage, self.flushed = Stage.VERIFYING, 0
        elif self.stage is Stage.VERIFYING:
            self.samples.append(sample)
            return len(self.samples) == VERIFIED
        return False

    def _heed(self, sample: Sample) -> None:
        """Do what a steady iteration asks for."""
        measured = self.measured
        known = measured is not None and measured.allocation_retries > 0
        asks = self.unrest.asks(flushed=sample.retries > 0, known=known)
        if asks is Asks.ROOM:
            self.piece.clear()
        elif asks is Asks.VERIFYING:
            _log.info("the allocator flushes its cache: what was steady is verified again")
            self.unrest.record = measured is not None and measured.recorded > 0
            self.stage = self._verifying
            self.samples, self.paced, self.flushed = [], [], 0
            self.piece.forget()

    def learn(self, trace: Trace, seen: Trace | None) -> Trace:
        """The trace with what an iteration that `shows_beside` showed; the plan names what runs."""
        learned = None if seen is None else with_beside(trace, seen)
        if learned is None or self.trial is None:
            return trace
        self.trial = replace(self.trial, plan=as_run(self.trial.plan, learned))
        return learned

    def recorded(self, sample: Sample) -> bool:
        """Add the events of an iteration to what was measured; whether it has any."""
        if sample.tape is None or self.trial is None or self.trial.measured is None:
            return False
        measured = with_events(self.trial.measured, sample.tape)
        measured = replace(measured, recorded=sample.number, recorded_seconds=sample.seconds)
        self.trial, self.unrest.record = replace(self.trial, measured=measured), False
        return True

    def conclude(
        self,
        verification: Verification,
        trace: Trace,
        numerics: tuple[str, ...],
        defaults: tuple[tuple[str, int], ...] = (),
    ) -> tuple[Trace, Trial | None]:
        """The trace as it is now known, and what to put in force; None if the plan stays.

        ``numerics`` says what can change a bit besides the settings of a plan, ``defaults`` how
        often saves did not match it, by reason.
        """
        if self.trial is None:
            return trace, None
        measured = summarize(self.samples, self.peak_bytes, defaults)
        shown = self.paced + self.samples
        trial = replace(self.trial, holes=self.piece.holes)
        self.tried = self._others(trial)
        self.trial = verification.verified(trial, trace, measured, shown)
        self.tried.append(self.trial)
        self.stage = Stage.STEADY
        trace, chosen = verification.chosen(trace, self.tried, shown, *numerics)
        return trace, None if chosen is self.trial else chosen

    def tighten(
        self, verification: Verification, trace: Trace, numerics: tuple[str, ...]
    ) -> Trial | None:
        """What to put in force after the device ran out of memory; None where nothing takes less.

        The plan in force counts as one under which the allocator had to flush its cache.
        """
        if self.trial is None:
            return None
        lost = replace(self.trial, measured=NOTHING)
        self.tried = [*self._others(lost), lost]
        return verification.tighter(trace, self.tried, *numerics)

    def _others(self, trial: Trial) -> list[Trial]:
        """What was tried, without what was measured of the same plan before."""
        return [it for it in self.tried if it.plan is not trial.plan]

    def observe_again(self) -> None:
        """Forget the plan: the program has changed."""
        self._give_up()
        self.stage, self.trial, self.unrest = Stage.WARM, None, Unrest()
        self.tried, self.samples, self.peak_bytes, self.deviations = [], [], 0, 0

    def _give_up(self) -> None:
        self.piece.close()
        if self.claim is not None:
            self.claim.close()
            self.claim = None

    def run(
        self, trace: Trace, notes: tuple[str, ...], versions: tuple[tuple[str, str], ...]
    ) -> Run | None:
        """Everything known of the kind; None without a plan in force."""
        if self.trial is None:
            return None
        plan, hardware = self.trial.plan, self.trial.hardware
        predicted = simulate(trace, hardware, plan)
        return Run(trace, hardware, plan, predicted, self.trial.measured, notes, versions)
