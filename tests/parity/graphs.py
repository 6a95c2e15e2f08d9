"""Captured graphs under plans made by hand: a host that carries out one plan for each graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from belady.graph.capture import backend_of
from belady.graph.captured import Captured
from belady.graph.contents import Contents, Place
from belady.graph.orders import orders_of
from belady.graph.parts import Drawn, Part
from belady.graph.program import program_of
from belady.graph.state import State, Turn
from belady.graph.trace import draw
from belady.graph.watching import Lasting, Names
from belady.ir.plan import Plan
from belady.ir.trace import Trace
from belady.memory.carrier import Carrier
from tests.support.training import Training

Chooser = Callable[[Trace], Plan]


def drawn_of(
    graph: Captured, args: Sequence[Any], models: Sequence[nn.Module], device: torch.device
) -> Drawn:
    """The trace of one forward and backward of a graph, from what it was traced with."""
    assert graph.joint is not None
    numbers = Names()
    names = [numbers.of(arg) for arg in args]
    tangents: list[int | None] = [-1 - place for place in range(len(graph.joint.tangents))]
    lasting = Lasting.of(models, numbers, device)
    kinds, modules = lasting.kinds, lasting.paths.of(graph, graph.joint, args)
    forward = Part(0, "graph", graph.joint, graph.layout, True, names, kinds, modules=modules)
    backward = Part(0, "graph", graph.joint, graph.layout, False, tangents, {})
    return draw([forward, backward], device)


class PlannedHost:
    """Carries out what ``choose`` says of the trace of each graph.

    Parameters
    ----------
    place
        Gives large gradients their place.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        carrier: Carrier,
        choose: Chooser,
        place: Place | None = None,
    ) -> None:
        self._place = place
        self.device, self.budget_bytes, self.plain_bits = carrier.device, 0, True
        self.drawn: list[Drawn] = []
        self.plans: list[Plan] = []
        self.reasons: list[str] = []
        self._models = models
        self.replan(carrier, choose)
        self._known: dict[Captured, Drawn] = {}

    def replan(self, carrier: Carrier, choose: Chooser) -> None:
        """Give every graph another plan from its next call on."""
        self._carrier = carrier
        self._choose = choose
        self._programs: dict[Captured, tuple[Any, Any]] = {}

    def captured(self, graph: Captured) -> None:
        pass

    def starved(self) -> None:
        """Leave the plan as it is."""

    def not_captured(self, reason: str) -> None:
        self.reasons.append(reason)

    def enter(self, graph: Captured, args: Sequence[Any]) -> Turn:
        if graph not in self._programs:
            self._programs[graph] = self._plan(graph, args)
        program, decisions = self._programs[graph]
        return Turn(program, Contents(self._carrier, decisions, place=self._place))

    def left(self, graph: Captured, state: State, results: Sequence[Any]) -> None:
        pass

    def enter_backward(self, state: State, args: Sequence[Any]) -> None:
        pass

    def left_backward(self, state: State, results: Sequence[Any]) -> None:
        pass

    def _plan(self, graph: Captured, args: Sequence[Any]) -> tuple[Any, Any]:
        assert graph.joint is not None
        if graph not in self._known:
            self._known[graph] = drawn_of(graph, args, self._models, self.device)
            self.drawn.append(self._known[graph])
        drawn = self._known[graph]
        plan = self._choose(drawn.trace)
        self.plans.append(plan)
        (orders,) = orders_of(drawn, plan, gradients_apart=self._place is not None)
        program = program_of(graph.joint, graph.layout, orders)
        return program, plan.decisions


@contextmanager
def compiled(training: Training, host: Any) -> Iterator[None]:
    """Let steps call the models through the graph engine; the models themselves stay."""
    models = training.models
    backend = backend_of(host)
    training.models = [torch.compile(it, backend=backend, dynamic=False) for it in models]
    try:
        yield
    finally:
        training.models = models
        torch._dynamo.reset()
