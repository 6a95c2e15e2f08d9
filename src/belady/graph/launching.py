"""Which iterations are launched as they were captured, instead of issued op by op."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from belady.errors import TierFullError
from belady.graph.capture import Captured
from belady.graph.doors import fake_value
from belady.graph.iteration import Iteration
from belady.graph.kinds import Kind
from belady.graph.launchable import storage_of, why_not
from belady.graph.launched import Launched
from belady.graph.placing import Places
from belady.graph.program import Program
from belady.ir.plan import Offload, Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Tier, Trace
from belady.measure.monitor import Sample, summarize
from belady.measure.stages import Stage
from belady.measure.verification import VERIFIED
from belady.memory.cap import PAGE_BYTES
from belady.memory.carrier import Carrier
from belady.memory.launches import Launches, captures
from belady.units import format_bytes, format_seconds

_log = logging.getLogger("belady")

# How a report begins to say that they are.
NOTE = "forward and backward are captured and launched in one piece each (CUDA graphs)"

# Iterations of one kind in a row after which it is captured, at first: each time that what was
# captured is given up, since something else runs too, twice as many.
_ROW, _MOST = 1, 32
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
    places
        What is set aside for gradients otherwise.

    Attributes
    ----------
    notes
        What a user should know, one sentence each.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        carrier: Carrier,
        budget_bytes: int,
        places: Places,
    ) -> None:
        self.notes: list[str] = []
        self._modules, self._carrier = modules, carrier
        self._budget_bytes, self._places = budget_bytes, places
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

    def program(self, iteration: Iteration, call: int, args: Sequence[Any]) -> Program:
        """What a call of an iteration under a plan runs as."""
        kind = iteration.kind
        force = kind.force if iteration.counted is None else kind.counting
        assert force is not None
        launched = None if call else self._first(iteration, args)
        return force.programs[call] if launched is None else launched.program

    def _first(self, iteration: Iteration, args: Sequence[Any]) -> Launched | None:
        """What the first call of an iteration is launched as; None where it is issued."""
        kind = iteration.kind
        if kind is not self._kind or iteration.sample.tape is not None:
            self.rest()
            self._kind = kind
        if kind.launchable is False or kind.stage is not Stage.STEADY:
            return None
        if self._launched is None and self._row >= self._wanted:
            self._launched = self._captured(kind, kind.graphs[0], args)
            if self._launched is None:
                kind.launchable = False
        elif self._launched is not None and not self._takes(self._launched, args):
            self._wanted *= 2
            self.rest()
            if kind.launchable is None and self._wanted > _MOST:
                kind.launchable = False
        return self._launched

    def _takes(self, launched: Launched, args: Sequence[Any]) -> bool:
        """Whether it may be launched now, perhaps when gradients have other memory."""
        if launched.takes(args):
            return True
        grads = (it.grad for module in self._modules for it in module.parameters())
        with suppress(torch.OutOfMemoryError):
            return launched.let_go_of(it for it in grads if it is not None) and launched.takes(args)
        return False

    def level(self, kind: Kind, *, recording: bool) -> int:
        """How much of the next iteration is measured, see `belady.measure.monitor`."""
        tried = kind is self._kind and self._launched is not None and self._samples
        return 1 if tried else kind.level(recording=recording)

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
            self._conclude(kind, self._launched)
            self._samples = []

    def rest(self) -> None:
        """Something else is going to run: give back what was captured."""
        launched, self._launched = self._launched, None
        self._row, self._samples = 0, []
        if launched is not None:
            launches = launched.launches
            launches.wait()
            launched.close()
            launches.forget()
            if self._kind is not None:
                self._issue_again(self._kind)

    def close(self) -> None:
        """Nothing is launched any more."""
        self._kind = None
        self.rest()

    def starved(self, kind: Kind) -> bool:
        """The device ran out of memory: whether that is of what was captured, which is gone now."""
        launched = self._launched is not None and kind is self._kind
        if launched:
            kind.launchable = False
        self.rest()
        return launched

    def _conclude(self, kind: Kind, launched: Launched) -> None:
        """Go on launching where that is faster and within the budget."""
        found = launched.measured(summarize(self._samples[1:], 0, ()))
        if kind.trial is None or kind.issued is None:
            return
        *_, before = kind.issued
        fits = found.reserved_bytes <= self._budget_bytes and not found.allocation_retries
        took = format_seconds(found.seconds), format_seconds(before.seconds)
        _log.info("launched in one piece an iteration takes %s, otherwise %s", *took)
        kind.launchable = fits and gains(min(found.iterations), before)
        if not kind.launchable:
            self.rest()
            return
        kind.issued = None
        kind.trial = replace(kind.trial, measured=found)
        said = f"{NOTE}: {took[0]} an iteration where issuing them took {took[1]}"
        self.notes[:] = [said]

    def _captured(self, kind: Kind, graph: Captured, args: Sequence[Any]) -> Launched | None:
        """The parts of an iteration as launches, where there is room for what else is needed."""
        lasting = {
            storage_of(it)
            for module in self._modules
            for it in (*module.parameters(), *module.buffers())
        }
        force, joint = kind.force, graph.joint
        assert force is not None
        assert joint is not None
        if reason := why_not(joint, graph.layout, args, lasting):
            _log.info("an iteration cannot be captured: %s", reason)
            return None
        # A capture places gradients itself.
        self._places.rest()
        launches = Launches(self._carrier.device)
        try:
            carrier = self._carrier.fixed(_sent(force.drawn.trace, force.plan))
            launched = Launched(force, launches, carrier, lasting, args)
        except (RuntimeError, TierFullError) as error:
            _log.info("an iteration cannot be captured: %s", str(error).partition("\n")[0])
            launched = None
        launches.over()
        needed = launches.reserved_bytes + kind.between_bytes
        if any(it.grad is not None for module in self._modules for it in module.parameters()):
            # They have not been zeroed yet, and so will need other memory in each iteration.
            needed += _bytes_of(force.drawn.parts[0].joint.backward_outputs)
        if launched is not None and needed > self._budget_bytes:
            lacks = format_bytes(needed - self._budget_bytes)
            _log.info("an iteration that is captured needs %s more than there is", lacks)
            launched.close()
            launched = None
        if launched is None:
            launches.forget()
            self._issue_again(kind)
        return launched

    def _issue_again(self, kind: Kind) -> None:
        """Set aside what iterations need that are issued."""
        self._places.again()
        kind.clear()

    def beside_bytes(self, kind: Kind) -> int:
        """What is needed beside launches, as far as it is known: it cannot lie where they write.

        That is copies of what forward is given and gives, and of what backward is given; and what
        the loss, or the optimizer's step, has at most.
        """
        if kind.force is None:
            return 0
        parts = kind.force.drawn.parts
        joint, inputs, kinds = parts[0].joint, parts[0].inputs, parts[0].kinds
        lasting = {node for node, it in zip(joint.primals, inputs, strict=True) if it in kinds}
        copied = [it for it in joint.primals if it not in lasting]
        fixed = _bytes_of(copied) + _bytes_of(joint.tangents)
        loss = _bytes_of(joint.forward_outputs) + max(part.outside_bytes for part in parts)
        stepping = max((it.beside_bytes for it in kind.samples), default=0)
        kind.between_bytes = int(_PIECES * max(loss, stepping)) + _PAGES * PAGE_BYTES
        return fixed + kind.between_bytes


def gains(seconds: float, before: Measured) -> bool:
    """Whether an iteration of so many seconds is worth it."""
    return seconds < (1 - _GAINS) * min(before.iterations)


def _bytes_of(nodes: Iterable[Any]) -> int:
    """Of what these nodes stand for."""
    values = (fake_value(node) for node in nodes if isinstance(node, fx.Node))
    return sum(it.nbytes for it in values if isinstance(it, torch.Tensor))


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
