"""One iteration of captured graphs under way."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from time import perf_counter

from belady.graph.captured import Captured
from belady.graph.contents import Contents, CountedContents
from belady.graph.counting import Counted
from belady.graph.kinds import Kind
from belady.graph.state import State
from belady.graph.watching import Watched
from belady.ir.ops import Phase
from belady.measure.monitor import Sample
from belady.memory.carrier import Carrier


@dataclass
class Iteration:
    """One iteration under way.

    Attributes
    ----------
    open
        What its forwards left for a backward that may still come.
    watched
        What is learned of it, while it is observed.
    strayed
        Whether it went another way than its plan expects.
    entered
        `host_seconds` when the last forward began.
    moments
        On the host's clock: when each part began, and when the last one ended.
    """

    kind: Kind
    contents: Contents | None
    watched: Watched | None
    counted: Counted | None
    sample: Sample
    graphs: list[Captured] = field(default_factory=list)
    order: list[tuple[int, bool]] = field(default_factory=list)
    open: weakref.WeakSet[State] = field(default_factory=weakref.WeakSet)
    strayed: bool = False
    ended: bool = False
    entered: float = 0.0
    moments: list[float] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        kind: Kind,
        carrier: Carrier,
        watched: Watched | None,
        counted: Counted | None,
        sample: Sample,
    ) -> Iteration:
        """Begin one of a kind."""
        contents = None
        if kind.force is not None:
            landing = None if counted is None else counted.seen
            decisions, place = kind.force.plan.decisions, kind.force.place
            if sample.now is None:
                contents = Contents(carrier, decisions, landing, place=place)
            else:
                contents = CountedContents(carrier, decisions, landing, sample.passed, place)
        return cls(kind, contents, watched, counted, sample)

    @property
    def engine_seconds(self) -> float:
        """What issuing the plan has taken the host so far."""
        return 0.0 if self.contents is None else self.contents.host_seconds

    def count_engine(self) -> None:
        """Note what issuing the plan has taken; nothing is taken over for a replay."""
        if self.contents is not None:
            self.sample.engine_seconds = self.engine_seconds
            self.sample.replay_seconds = self.contents.encoding_seconds

    @property
    def host_seconds(self) -> float:
        """The host's time, without what issuing the plan has taken of it."""
        return perf_counter() - self.engine_seconds

    @property
    def turned(self) -> bool:
        """Whether a backward has begun."""
        return not all(forward for _, forward in self.order)

    def begins(self, call: int, *, forward: bool) -> None:
        """A part begins: take it down, where the iteration is measured and goes as planned.

        What is done between forward and backward, such as a loss, counts to forward. Where the
        device is to be held back, it is from here on.
        """
        self.order.append((call, forward))
        self.moments.append(perf_counter())
        self.sample.mark(Phase.FORWARD if forward else Phase.BACKWARD)
        force, part = self.kind.force, len(self.order) - 1
        if force is not None and part < len(force.drawn.starts):
            start, *later = force.drawn.starts[part:]
            ops = range(start, min([len(force.drawn.trace.ops), *later]))
            # First: what the host then takes to note the boundary is within its lead.
            self.sample.hold(self.kind.lead(part), ops)
            self.sample.passed(start)

    def ends(self) -> None:
        """Its last part has been issued."""
        self.ended = True
        self.moments.append(perf_counter())
