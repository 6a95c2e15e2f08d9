"""One kind of iteration of captured graphs: how far the engine has come with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from belady.graph.captured import Captured
from belady.graph.contents import Place
from belady.graph.orders import AS_SAVED, orders_of
from belady.graph.parts import Drawn
from belady.graph.program import Program, program_of
from belady.graph.prospect import Prospect, Way
from belady.graph.seams import told_at
from belady.graph.segments import Fuse
from belady.ir.plan import Plan
from belady.measure.observe import undisturbed
from belady.measure.progress import Progress
from belady.measure.stages import Stage

ELSEWHERE = "lies on other bytes than it was traced with"
MAY_BE_OFF = "what is predicted may be off"
TWICE = (
    "an iteration with a second backward through the same call (retain_graph=True) is not planned, "
    "and all that may move does: engine='eager' plans it"
)

# Most that the device is held back for: libraries that look for algorithms, and programs that write
# a file before they go back, keep the host longer.
_LEAD_AT_MOST_S = 1.0
# Calls and backwards of an iteration in order: the number of the call, and whether it is forward.
Order = tuple[tuple[int, bool], ...]


@dataclass(frozen=True)
class Force:
    """A plan ready to be carried out: the program of each call.

    Attributes
    ----------
    place
        Gives large gradients their place; None where they stay among activations.
    """

    plan: Plan
    drawn: Drawn
    programs: tuple[Program, ...]
    place: Place | None = None

    @classmethod
    def of(
        cls,
        graphs: Sequence[Captured],
        drawn: Drawn,
        plan: Plan,
        *,
        watched: bool = False,
        fuse: Fuse | None = None,
        place: Place | None = None,
    ) -> Force:
        """Generate the programs of a plan; one that moves nothing has those of plain PyTorch."""
        # How long kernels take that a compiler makes is known between boundaries alone.
        told = () if fuse is None else told_at(drawn.trace)
        orders = orders_of(drawn, plan, gradients_apart=place is not None, told=told)
        programs = []
        for graph, order in zip(graphs, orders, strict=True):
            if graph.joint is None:
                raise RuntimeError("a graph that was not cut cannot be planned")
            nothing, plainly = plan.moves_nothing, not watched and fuse is None
            programs.append(
                graph.as_saved
                if nothing and plainly
                else program_of(
                    graph.joint,
                    graph.layout,
                    AS_SAVED if nothing else order,
                    watched=watched,
                    fuse=fuse,
                )
            )
        return cls(plan, drawn, tuple(programs), place)


@dataclass
class Kind(Progress):
    """One kind of iteration and what is known of it.

    Attributes
    ----------
    graphs
        The graphs that it calls, in order.
    order
        Its calls and backwards.
    warm
        Drawn from its first iteration.
    force
        The plan in force, ready to be carried out.
    counting
        The same, watched, for the iteration whose bytes are counted; only on a CPU.
    doubted
        Whether no plan was found for what was observed, and it is observed once more.
    moments
        Of its last iteration under a plan, see `belady.graph.iteration.Iteration`.
    prospect
        Whether its iterations are launched as they were captured.
    """

    graphs: tuple[Captured, ...] = ()
    order: Order = ()
    warm: Drawn | None = None
    force: Force | None = None
    counting: Force | None = None
    doubted: bool = False
    moments: Sequence[float] = ()
    prospect: Prospect = field(default_factory=Prospect)

    @property
    def shown(self) -> Stage:
        """The stage that users are told: what is still to be tried is not steady."""
        tried = self.stage is Stage.STEADY and self.prospect.open
        return Stage.VERIFYING if tried else self.stage

    @property
    def issued(self) -> bool:
        """Whether its steady iterations are issued op by op, and the plan in force stays."""
        return self.prospect.way is Way.ISSUED and self.prospect.instead is None

    def same(self, graphs: Sequence[Captured], order: Order) -> bool:
        """Whether an iteration went as this kind goes."""
        return order == self.order and tuple(graphs) == self.graphs

    def lead(self, part: int) -> float:
        """Seconds by which the host is to be ahead of the device at a part; 0 but for a pace.

        What the host took from there to the next part: so it is ahead until the next one begins.
        The most where that is not known, as of a forward whose backward did not come.
        """
        if self.stage is not Stage.PACED:
            return 0.0
        took = (end - self.moments[part] for end in self.moments[part + 1 : part + 2])
        return min([_LEAD_AT_MOST_S, *took])

    def observe_again(self) -> None:
        """Forget the plan: the program has changed."""
        super().observe_again()
        self.prospect = Prospect()
        self.warm = self.force = self.counting = None

    def doubt(self) -> None:
        """Observe the kind anew, once."""
        self.observe_again()
        self.doubted = True


def settled(drawn: Drawn, before: Drawn | None) -> Drawn:
    """What was drawn, with the smaller seconds of two observations."""
    if before is None:
        return drawn
    return replace(drawn, trace=undisturbed(drawn.trace, before.trace))


def all_go_back(order: Order) -> bool:
    """Whether every call had a backward."""
    return {call for call, _ in order} == {call for call, forward in order if not forward}


def goes_back_once(order: Order) -> bool:
    """Whether no call had more than one backward."""
    calls = [call for call, forward in order if not forward]
    return len(set(calls)) == len(calls)
