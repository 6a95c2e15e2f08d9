"""Which iterations are launched as they were captured, instead of issued op by op."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from belady.graph import beside, told
from belady.graph.captured import Captured
from belady.graph.capturing import Attempt
from belady.graph.iteration import Iteration
from belady.graph.kinds import Kind
from belady.graph.launchable import is_one_of_several, lasting_of, packs, why_not
from belady.graph.launched import Launched
from belady.graph.listening import Listening
from belady.graph.placing import Places
from belady.graph.program import Program
from belady.graph.prospect import NO_ROOM, OTHERS, RAN_OUT, Way
from belady.graph.steps import Loans, may_lend
from belady.ir.plan import Offload
from belady.ir.trace import Tier
from belady.measure.key import gradients_in
from belady.measure.monitor import Sample, summarize
from belady.measure.stages import Stage
from belady.memory.carrier import Carrier
from belady.memory.launches import captures
from belady.memory.ledger import Ledger

_log = logging.getLogger("belady")

# Most iterations in a row that a kind waits for until it is captured: twice as many each time that
# what was captured is given back, since something else runs too. And most that it is tried for.
_MOST = 32
# Part of an iteration that a launch has to gain: what is captured keeps its memory.
_GAINS = 0.01
# Launches that are timed: the median of an odd number leaves out one that was held up.
_COMPARED = 3
_ONCE = ((0, True), (0, False))
# Where copies go without the host: what is written to disk is written by a thread.
_TIERS = frozenset({Tier.HOST})


class Launching:
    """Has one kind of iteration launched, while nothing else runs.

    What is captured keeps its memory, as no plan does: so it is given up before anything else of
    the models runs.

    Parameters
    ----------
    modules
        The models whose parameters and buffers stay where they are; the list may grow.
    places
        What is set aside for gradients otherwise.

    Attributes
    ----------
    loans
        What optimizers' steps are lent.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        carrier: Carrier,
        budget_bytes: int,
        places: Places,
    ) -> None:
        self._modules, self._carrier = modules, carrier
        self._budget_bytes, self._places = budget_bytes, places
        self._kind: Kind | None = None
        self._launched: Launched | None = None
        self._row = 0
        self._samples: list[Sample] = []
        self._ledger = Ledger(carrier.device)
        self.loans = Loans(self._ledger, self.rest)
        self._listening = Listening(carrier.device, budget_bytes, self._ledger, self.loans)

    @property
    def notes(self) -> list[str]:
        """What a user should know of the kind that runs, one sentence each."""
        return [] if self._kind is None else told.said_of(self._kind, self._budget_bytes)

    def weigh(self, kind: Kind) -> None:
        """See what a verified kind needs beside launches."""
        prospect = kind.prospect
        prospect.packs = packs(self._carrier.device)
        prospect.step.nbytes = beside.stepping_bytes(kind)
        prospect.step.lent = self.loans.possible and told.matters(kind, self._budget_bytes)
        prospect.beside.unlent = beside.between_bytes(kind, lends=False)
        prospect.beside.between = beside.between_bytes(kind, lends=prospect.step.lent)

    def begin(self, kind: Kind) -> None:
        """A plan is in force: see whether its iterations may be launched."""
        self.rest()
        # Once a plan for launches has been asked for, it is the only one that may be.
        tries = not kind.prospect.asked and self.may(kind)
        kind.prospect.way = Way.TRIED if tries else Way.ISSUED
        kind.prospect.begin()

    def may(self, kind: Kind) -> bool:
        """Whether iterations under the plan in force may be launched."""
        assert kind.force is not None
        alone = len(kind.graphs) == 1 and kind.order == _ONCE
        moved = (it for it in kind.force.plan.decisions.values() if isinstance(it, Offload))
        able = captures(self._carrier.device) and not is_one_of_several()
        return able and alone and {it.tier for it in moved} <= _TIERS

    def only(self, kind: Kind) -> None:
        """An iteration begins: what was captured of another kind is given back."""
        if not self.loans.over():
            # A launch would write over what a step has kept.
            self.rest()
        self._listening.drop()
        before = self._kind
        if kind is not before:
            held, self._kind = self._launched is not None, kind
            self._give_back()
            if before is not None:
                # What it was to be listened to for is another's.
                before.piece.close()
            if held and before is not None:
                before.prospect.put_off(_MOST)
                self._issue_again(kind)

    def program(self, iteration: Iteration, call: int, args: Sequence[Any]) -> Program:
        """What a call of an iteration under a plan runs as."""
        kind = iteration.kind
        force = kind.force if iteration.counted is None else kind.counting
        assert force is not None
        launched = None if call else self._first(iteration, args)
        if launched is not None:
            return launched.program()
        if kind.prospect.tight and not call:
            self._listening.rehearse(kind.prospect)
        return self._listening.program(force.programs[call])

    def _first(self, iteration: Iteration, args: Sequence[Any]) -> Launched | None:
        """What the first call of an iteration is launched as; None where it is issued."""
        kind = iteration.kind
        if iteration.sample.tape is not None:
            self.rest()
        if kind.prospect.way is Way.ISSUED:
            return None
        beside.look(kind, args)
        if kind.stage is not Stage.STEADY:
            return None
        if self._launched is None and kind.prospect.may_follow(self._row):
            self._launched = self._captured(kind, kind.graphs[0], args)
            if self._launched is None:
                kind.prospect.way = Way.ISSUED
        elif self._launched is None:
            self._listening.begin(kind.prospect)
        elif not (
            self._launched.takes(args)
            or (self._move_gradients(self._launched) and self._launched.takes(args))
        ):
            self.rest()
        return self._launched

    def _move_gradients(self, launched: Launched) -> bool:
        """Have gradients that are still there lie elsewhere; whether there were any."""
        with suppress(torch.OutOfMemoryError):
            return launched.let_go_of(gradients_in(self._modules))
        return False

    def level(self, kind: Kind, *, recording: bool) -> int:
        """How much of the next iteration is measured, see `belady.measure.monitor`."""
        if kind.prospect.way is Way.TRIED and kind.stage is Stage.STEADY:
            # What it does otherwise nobody asks for.
            return int(kind is self._kind and self._launched is not None and bool(self._samples))
        return kind.level(recording=recording)

    def went(self, kind: Kind, sample: Sample) -> None:
        """An iteration went as planned."""
        if kind is not self._kind or kind.stage is not Stage.STEADY:
            return
        self._row += 1
        prospect, launched = kind.prospect, self._launched is not None
        self._listening.went(prospect)
        if prospect.way is Way.ISSUED:
            return
        goes_on = prospect.way is Way.LAUNCHED and launched
        prospect.waited = 0 if goes_on else prospect.waited + 1
        if prospect.waited > _MOST:
            prospect.issue(OTHERS)
        if self._launched is None or prospect.way is not Way.TRIED:
            return
        # The first one is captured, too.
        self._samples.append(sample)
        if len(self._samples) > _COMPARED:
            self._conclude(kind, self._launched)
            self._samples = []

    def rest(self) -> None:
        """Something else is going to run: give back what was captured."""
        kind, held = self._kind, self._launched is not None
        self._give_back()
        if held and kind is not None:
            kind.prospect.put_off(_MOST)
            self._issue_again(kind)

    def close(self) -> None:
        """Nothing is launched any more."""
        self._give_back()
        if self._kind is not None:
            self._kind.piece.close()

    def _give_back(self) -> None:
        launched, self._launched = self._launched, None
        self._row, self._samples = 0, []
        self._ledger.drop()
        self.loans.lend_of(None)
        if launched is not None:
            # They would hold memory that nobody else is given.
            self._move_gradients(launched)
            launched.launches.wait()
            launched.close()
            launched.launches.forget()

    def starved(self, kind: Kind) -> bool:
        """The device ran out of memory: whether that is of what was captured, which is gone now."""
        launched = self._launched is not None and kind is self._kind
        self.rest()
        if rehearsed := self._listening.drop():
            kind.prospect.unpack()
        if launched or rehearsed:
            _log.info("out of memory where iterations are launched, or were to be: they are issued")
            kind.prospect.issue(RAN_OUT if launched else NO_ROOM)
        return launched or rehearsed

    def _conclude(self, kind: Kind, launched: Launched) -> None:
        """Go on launching where that is faster and within the budget."""
        found = launched.measured(summarize(self._samples[1:], 0, ()))
        if kind.trial is None or kind.prospect.instead is None:
            self.rest()
            kind.prospect.way = Way.ISSUED
            return
        _, before = kind.prospect.instead[-1]
        fits = found.reserved_bytes <= self._budget_bytes and not found.allocation_retries
        told.log_launched(found, before)
        if not fits or not gains(found.seconds, before.seconds):
            self.rest()
            kind.prospect.issue(told.gained_nothing(found, before, self._budget_bytes))
            return
        kind.prospect.way, kind.prospect.why = Way.LAUNCHED, ""
        kind.trial = replace(kind.trial, measured=found)

    def _captured(self, kind: Kind, graph: Captured, args: Sequence[Any]) -> Launched | None:
        """The parts of an iteration as launches, where there is room for what else is needed."""
        lasting, joint = lasting_of(self._modules), graph.joint
        assert joint is not None
        if reason := why_not(joint, graph.layout, args, lasting):
            _log.info("an iteration cannot be captured: %s", reason)
            kind.prospect.why = reason
            return None
        if not captures(self._carrier.device):
            return None
        # A capture places gradients itself.
        self._places.rest()
        room = self._budget_bytes - kind.prospect.beside.between
        if next(gradients_in(self._modules), None) is not None:
            # They have not been zeroed yet, and so will need other memory in each iteration.
            room -= beside.bytes_of(joint.backward_outputs)
        attempt = Attempt.of(kind, self._carrier, lasting, args, room)
        if (launched := self._attempted(attempt, kind)) is None:
            self._issue_again(kind)
        return launched

    def _attempted(self, attempt: Attempt, kind: Kind) -> Launched | None:
        """What an attempt captures; None where something is lacking."""
        prospect, (launched, lacking, why) = kind.prospect, attempt.captured()
        if launched is None:
            prospect.why = NO_ROOM if lacking else why
            prospect.failed(lacking, beside.fixed_bytes(kind))
            return None
        lends = prospect.step.lent
        if lends and not (self.loans.possible and may_lend(launched, attempt, prospect.step)):
            launched.close()
            launched.launches.forget()
            prospect.lend_no_more()
            return None
        prospect.holes = launched.launches.holes
        self.loans.lend_of(launched if lends else None)
        return launched

    def _issue_again(self, kind: Kind) -> None:
        """Set aside what iterations need that are issued."""
        self._places.again()
        kind.piece.clear()


def gains(seconds: float, before: float) -> bool:
    """Whether an iteration of so many seconds is worth it, rather than one of ``before``."""
    return seconds < (1 - _GAINS) * before
