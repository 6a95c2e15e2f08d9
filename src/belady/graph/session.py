"""Decides how captured graphs run: at the floor while they are observed, then under a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from belady.graph import autograd
from belady.graph.admission import Admission
from belady.graph.calls import backward_of, part_of
from belady.graph.captured import Captured
from belady.graph.contents import Contents
from belady.graph.counting import Counted
from belady.graph.iteration import Iteration
from belady.graph.kinds import ELSEWHERE, MAY_BE_OFF, TWICE, Kind, Order, goes_back_once, settled
from belady.graph.planning import Planning
from belady.graph.refusals import unmanaged
from belady.graph.state import State, Turn
from belady.graph.steps import Steps
from belady.graph.trace import draw
from belady.graph.watching import Watched
from belady.ir.hardware import HardwareProfile
from belady.ir.run import Run
from belady.measure.monitor import Monitor, Sample
from belady.measure.stages import Policy, Stage
from belady.measure.trial import all_kept
from belady.memory.carrier import Carrier

if TYPE_CHECKING:
    from belady.graph.inductor import Inductor


class Session:
    """The host of all graphs of some models: `belady.graph.host.Host`.

    An iteration begins with the first forward after everything that was saved has been consumed or
    thrown away, or where the first graph of one is called again after a backward: what is still
    saved then is of a forward whose backward does not come.

    Parameters
    ----------
    modules
        The roots; the list may grow.
    ended
        Called after every iteration with its stage and measurement.
    inductor
        Makes the kernels of planned iterations; None: each op has its own.

    Attributes
    ----------
    reasons
        Why parts of the models run as plain PyTorch, and how often each was met.
    notes
        What a user should know of iterations that were observed, one sentence each.
    admission
        What is done to modules before they run.
    launching
        Has iterations launched as they were captured.
    calling
        Name of the root whose call is under way, or was the last one.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        carrier: Carrier,
        modules: Sequence[torch.nn.Module],
        ended: Callable[[Stage, Sample], None],
        inductor: Inductor | None = None,
    ) -> None:
        self.device, self.budget_bytes = carrier.device, policy.budget.device_bytes
        self.plain_bits, self.calling = inductor is None, ""
        self.reasons, self.notes = Counter[str](), list[str]()
        self.admission = Admission(policy, hardware, carrier.device)
        self._modules = modules
        weigh = self.admission.weigh
        self._planning = Planning(modules, policy, hardware, carrier, inductor, weigh)
        self.launching = self._planning.launching
        self._hardware, self._carrier, self._ended = hardware, carrier, ended
        self._monitor = Monitor(self.device, carrier)
        self._steps = Steps(modules, self._monitor, self.launching.loans)
        self._kinds: dict[Captured, Kind] = {}
        self._iteration: Iteration | None = None
        self._latest: Kind | None = None
        self._recording = self._closed = False

    def captured(self, graph: Captured) -> None:
        """Name it; it is planned when it is first called."""
        graph.name = self.calling

    def not_captured(self, reason: str) -> None:
        """Count it."""
        self.reasons[reason] += 1

    def record(self) -> None:
        """Take down every event of the next steady iteration."""
        self._recording = True

    def enter(self, graph: Captured, args: Sequence[Any]) -> Turn:
        """Choose the program of a forward.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits the budget; nothing has run then.
        """
        if self._closed:
            return Turn(graph.as_saved)
        turn = self._turn(graph, args)
        self.admission.began = True
        turn.tag[0].entered = turn.tag[0].host_seconds
        return turn

    def _turn(self, graph: Captured, args: Sequence[Any]) -> Turn:
        iteration = self._iteration
        over = iteration is not None and iteration.turned and iteration.graphs[0] is graph
        if iteration is None or not iteration.open or over:
            self.finish()
            iteration = self._begin(graph)
        call, watched = len(iteration.graphs), iteration.watched
        force, kind, floor = iteration.kind.force, iteration.kind, None
        if force is None or kind.graphs[call : call + 1] != (graph,):
            # Before anything is noted: it may be refused, and then called again in another way.
            floor = self._planning.floor(graph, args, watched=watched is not None)
        iteration.graphs.append(graph)
        iteration.begins(call, forward=True)
        if floor is not None:
            iteration.strayed = iteration.strayed or force is not None
            if watched is not None:
                watched.enter(part_of(graph, call, args, watched.names, watched.lasting), args)
            contents = Contents(self._carrier, floor.plan.decisions)
            return Turn(floor.programs[0], contents, watched, (iteration, call))
        if iteration.counted is not None:
            iteration.counted.seen(args)
        program = self.launching.program(iteration, call, args)
        return Turn(program, iteration.contents, iteration.counted, (iteration, call))

    def left(self, graph: Captured, state: State, results: Sequence[Any]) -> None:
        """Note what came out."""
        if state.turn.tag is None:
            return
        iteration, _ = state.turn.tag
        iteration.sample.host_seconds += iteration.host_seconds - iteration.entered
        iteration.open.add(state)
        if iteration.watched is not None:
            iteration.watched.leave(results, state.outside(), state)

    def differs(self, graph: Captured, word: str) -> None:
        """Note it."""
        self._planning.bits.found(word, graph.name)

    def enter_backward(self, state: State, args: Sequence[Any]) -> None:
        """Note what comes in."""
        if state.turn.tag is None:
            return
        iteration, call = state.turn.tag
        iteration.begins(call, forward=False)
        watched = iteration.watched
        if iteration.counted is not None:
            iteration.counted.seen(args)
        if watched is not None:
            part = backward_of(state.graph, call, args, watched.names, watched.lasting)
            watched.enter(part, args)

    def left_backward(self, state: State, results: Sequence[Any]) -> None:
        """Note what came out; with nothing left to consume, the iteration's work is done."""
        if state.turn.tag is None:
            return
        iteration, _ = state.turn.tag
        if iteration.watched is not None:
            iteration.watched.leave(results)
        observed = iteration.watched is not None
        self._planning.bits.watch(state.graph, results, observed=observed)
        if not autograd.keeps_graph():
            iteration.open.discard(state)
        current = self._iteration
        if current is not None and current is iteration and not (current.open or current.ended):
            iteration.ends()
            self._monitor.end(iteration.sample)

    def finish(self) -> None:
        """The iteration is over: learn from it.

        Raises
        ------
        InfeasibleBudgetError
            If it was the last one observed, and no plan of the policy fits.
        """
        iteration, self._iteration = self._iteration, None
        if iteration is None:
            return
        if iteration.turned and not iteration.ended:
            # A forward's backward did not come, and what it saved outlived the last one that did.
            self._monitor.end(iteration.sample)
        elif not iteration.turned:
            self._monitor.cancel()
        self._monitor.after()
        self._carrier.sweep()
        self._planning.bits.forget()
        iteration.count_engine()
        if iteration.turned:
            self._ended(iteration.kind.shown, iteration.sample)
            order = tuple(iteration.order)
            if iteration.watched is not None:
                self._observed(iteration, iteration.watched, order)
            elif iteration.kind.force is not None:
                self._carried_out(iteration, order)

    def close(self) -> None:
        """From now on graphs save on the device, as plain PyTorch does. Idempotent."""
        self._settle()
        self._closed = True
        self.admission.close()
        self._steps.close()
        self._planning.close()
        self._abandon()

    def starved(self) -> None:
        """The device ran out of memory: give the iteration up, tighten the plan of the next."""
        kind = self._latest if self._iteration is None else self._iteration.kind
        if kind is not None:
            kind.starved = not self.launching.starved(kind)
        self._abandon()

    def _abandon(self) -> None:
        iteration, self._iteration = self._iteration, None
        self._planning.bits.forget()
        if iteration is not None and not iteration.ended:
            self._monitor.cancel()

    def _settle(self) -> None:
        """Learn from an iteration under a plan whose end only the next one would show."""
        iteration = self._iteration
        if iteration is not None and iteration.ended and iteration.kind.force is not None:
            self.finish()

    @property
    def verified(self) -> bool | None:
        """Whether measured peaks kept to the budget; None before anything was verified."""
        return all_kept(kind.trial for kind in self._kinds.values())

    def run(self, versions: tuple[tuple[str, str], ...] = ()) -> Run | None:
        """Everything known of the kind of iteration that ran last under a plan, or None."""
        self._settle()
        kind = self._latest
        if kind is None or kind.force is None:
            return None
        return kind.run(kind.force.drawn.trace, tuple(self.said), versions)

    @property
    def said(self) -> list[str]:
        """What a user should know, with a plan or without one, one sentence each."""
        return self.notes + self.admission.said + self._planning.notes + unmanaged(self.reasons)

    def _begin(self, graph: Captured) -> Iteration:
        kind = self._kinds.setdefault(graph, Kind(unwatched=self._planning.unwatched))
        self._planning.begin(kind)
        watched = counted = None
        if kind.watched:
            tries = self._planning.recomputes
            watched = Watched.begin(self._modules, self.device, tries=tries)
        if kind.counting is not None:
            counted = Counted(self._modules, self._hardware.allocator)
        level = self.launching.level(kind, recording=self._recording)
        sample = self._monitor.begin(level, paced=True)
        self._iteration = Iteration.of(kind, self._carrier, watched, counted, sample)
        return self._iteration

    def _observed(self, iteration: Iteration, watched: Watched, order: Order) -> None:
        kind, drawn = iteration.kind, None
        if goes_back_once(order):
            said = [f"{op} {ELSEWHERE}: {MAY_BE_OFF}" for op in sorted(watched.surprises)]
            parts, unseen = watched.finish(), watched.unseen_bytes()
            drawn = draw(parts, self.device, unseen, watched.released, watched.thrown_away)
        else:
            said = [TWICE]
        self.notes += [it for it in said if it not in self.notes]
        usable = drawn is not None
        alike = kind.seen(alike=usable and kind.same(iteration.graphs, order), usable=usable)
        if alike and drawn is not None:
            self._planning.plan(kind, settled(drawn, kind.warm))
            self._latest = kind
        else:
            kind.graphs, kind.order, kind.warm = tuple(iteration.graphs), order, drawn

    def _carried_out(self, iteration: Iteration, order: Order) -> None:
        self._latest = kind = iteration.kind
        if iteration.strayed or not kind.same(iteration.graphs, order):
            kind.went_otherwise()
            return
        self._recording = not kind.recorded(iteration.sample) and self._recording
        kind.counting, kind.moments = None, iteration.moments
        peak = 0 if iteration.counted is None else iteration.counted.peak_bytes
        self.launching.went(kind, iteration.sample)
        if kind.went_as_planned(iteration.sample, peak):
            self._planning.verify(kind)
