"""Which iterations are launched as they were captured, instead of issued op by op."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from belady.errors import TierFullError
from belady.graph.capture import Captured
from belady.graph.doors import beneath_functions
from belady.graph.iteration import Iteration
from belady.graph.kinds import Kind
from belady.graph.launched import FixedContents, Launched, why_not
from belady.graph.program import Program
from belady.ir.collector import seldom_collected
from belady.ir.plan import Offload, Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Tier, Trace
from belady.measure.monitor import Sample, summarize
from belady.measure.stages import Stage
from belady.measure.verification import VERIFIED
from belady.memory.cap import PAGE_BYTES
from belady.memory.carrier import Carrier
from belady.memory.geometry import below_autograd
from belady.memory.launches import Launches, captures
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# Iterations of one kind in a row after which it is captured, at first: each time that what was
# captured is given up, since something else runs too, twice as many.
_ROW = 1
# Part of an iteration that a launch has to gain.
_GAINS = 0.02
# What is taken outside of the graphs leaves pieces, too.
_PIECES, _PAGES = 1.1, 2
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

    Attributes
    ----------
    notes
        What a user should know, one sentence each.
    """

    def __init__(
        self, modules: Sequence[torch.nn.Module], carrier: Carrier, budget_bytes: int
    ) -> None:
        self.notes: list[str] = []
        self._modules, self._carrier = modules, carrier
        self._budget_bytes = budget_bytes
        self._kind: Kind | None = None
        self._launched: Launched | None = None
        self._row, self._wanted = 0, _ROW
        self._samples: list[Sample] = []

    def begin(self, kind: Kind) -> None:
        """A plan is in force: see whether its iterations may be launched."""
        self.rest()
        assert kind.force is not None
        alone = len(kind.graphs) == 1 and kind.order == _ONCE
        moved = (it for it in kind.force.plan.decisions.values() if isinstance(it, Offload))
        tiers = {it.tier for it in moved}
        able = captures(self._carrier.device) and not _is_one_of_several()
        kind.launchable = None if able and alone and tiers <= _TIERS else False

    def program(self, iteration: Iteration, graph: Captured, args: Sequence[Any]) -> Program | None:
        """What the first call of an iteration runs as; None: what its plan says."""
        kind = iteration.kind
        if kind is not self._kind or iteration.sample.tape is not None:
            self.rest()
            self._kind = kind
        if kind.launchable is False or kind.stage is not Stage.STEADY:
            return None
        if self._launched is None and self._row >= self._wanted:
            self._launched = self._captured(kind, graph, args)
            if self._launched is None:
                kind.launchable = False
        elif self._launched is not None and not self._launched.takes(args):
            self._wanted *= 2
            self.rest()
        return None if self._launched is None else self._launched.program

    @property
    def measures(self) -> bool:
        """Whether the next iteration is measured, if it is of the kind that is launched."""
        return bool(self._samples) and self._launched is not None

    def went(self, kind: Kind, sample: Sample) -> None:
        """An iteration went as planned."""
        if kind is not self._kind or kind.stage is not Stage.STEADY:
            return
        self._row += 1
        if self._launched is None or kind.launchable is not None:
            return
        # The first one is captured, too.
        self._samples.append(sample)
        if len(self._samples) > VERIFIED:
            self._conclude(kind, summarize(self._samples[1:], 0, ()))
            self._samples = []

    def rest(self) -> None:
        """Something else is going to run: give back what was captured."""
        launched, self._launched = self._launched, None
        self._row, self._samples = 0, []
        if launched is not None:
            launches = launched.launches
            launches.wait()
            del launched
            launches.forget()
            if self._kind is not None:
                self._kind.clear()

    def starved(self, kind: Kind) -> bool:
        """The device ran out of memory: whether that is of what was captured, which is gone now."""
        launched = self._launched is not None and kind is self._kind
        if launched:
            kind.launchable = False
        self.rest()
        return launched

    def _conclude(self, kind: Kind, found: Measured) -> None:
        """Go on launching where that is faster and within the budget."""
        before = None if kind.trial is None else kind.trial.measured
        if kind.trial is None or before is None:
            return
        gains = min(found.iterations) < (1 - _GAINS) * min(before.iterations)
        fits = found.reserved_bytes <= self._budget_bytes and not found.allocation_retries
        took = format_seconds(found.seconds), format_seconds(before.seconds)
        _log.info("launched in one piece an iteration takes %s, otherwise %s", *took)
        kind.launchable = gains and fits
        if not kind.launchable:
            self.rest()
            return
        # What is held is counted where ops are issued; what a launch holds is what was captured.
        peaks, moved = before.peaks, before.moved
        kind.trial = replace(kind.trial, measured=replace(found, peaks=peaks, moved=moved))
        self.notes[:] = [
            f"forward and backward are captured and launched in one piece each (CUDA graphs): "
            f"{took[0]} an iteration where issuing them took {took[1]}"
        ]

    def _captured(self, kind: Kind, graph: Captured, args: Sequence[Any]) -> Launched | None:
        """The parts of an iteration as launches, where there is room for what else is needed."""
        lasting = {
            it.untyped_storage()._cdata
            for module in self._modules
            for it in (*module.parameters(), *module.buffers())
        }
        force, joint = kind.force, graph.joint
        assert force is not None
        assert joint is not None
        if reason := why_not(joint, graph.layout, args, lasting):
            _log.info("an iteration cannot be captured: %s", reason)
            return None
        launches = Launches(self._carrier.device)
        try:
            carrier = self._carrier.fixed(_sent(force.drawn.trace, force.plan))
            contents, program = FixedContents(carrier, force.plan.decisions), force.programs[0]
            with below_autograd(), beneath_functions(), seldom_collected():
                launched = Launched(joint, program, launches, contents, carrier, lasting, args)
        except (RuntimeError, TierFullError) as error:
            _log.info("an iteration cannot be captured: %s", str(error).partition("\n")[0])
            launched = None
        launches.over()
        needed = 0 if launched is None else self._needed(kind, launched)
        if needed > self._budget_bytes:
            lacks = format_bytes(int(needed) - self._budget_bytes)
            _log.info("an iteration that is captured needs %s more than there is", lacks)
            launched = None
        if launched is None:
            launches.forget()
        return launched

    def _needed(self, kind: Kind, launched: Launched) -> float:
        """What torch will reserve, with what runs between launches."""
        assert kind.force is not None
        loss = max((part.outside_bytes for part in kind.force.drawn.parts), default=0)
        stepping = max((it.beside_bytes for it in kind.samples), default=0)
        between = max(launched.result_bytes + loss, stepping)
        reserved = launched.launches.reserved_bytes
        return reserved + _PIECES * between + _PAGES * PAGE_BYTES


def _sent(trace: Trace, plan: Plan) -> dict[int, int]:
    """Bytes of each value that goes to host memory."""
    return {
        value: trace.storages[trace.values[value].storage].nbytes
        for value, decision in plan.decisions.items()
        if isinstance(decision, Offload)
    }


def _is_one_of_several() -> bool:
    """Whether other processes take part, whose collectives a launch would not know of."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized()
