"""Plans for captured graphs: before one has run, and when an iteration was observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from belady.errors import InfeasibleBudgetError
from belady.graph.beside import bytes_of, fixed_bytes
from belady.graph.bits import Bits
from belady.graph.calls import part_of
from belady.graph.captured import Captured
from belady.graph.convolutions import Replayed
from belady.graph.kinds import Force, Kind, all_go_back
from belady.graph.launching import Launching, gains
from belady.graph.ops import is_fused
from belady.graph.ordering import Ordering
from belady.graph.parts import Drawn, Part
from belady.graph.placing import Places
from belady.graph.prospect import NO_FASTER, Again, Ran, Way, shows_more
from belady.graph.restrained import restrained
from belady.graph.seams import as_fused, at_seams, seams_of
from belady.graph.trace import draw
from belady.graph.watching import Lasting, Names
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Plan
from belady.ir.trace import Trace
from belady.measure.kernels import ITS_OWN, Kernels
from belady.measure.margins import with_settled
from belady.measure.stages import Policy, Stage
from belady.measure.trial import Trial
from belady.measure.unissued import freed, loses
from belady.measure.verification import Verification
from belady.memory.carrier import Carrier
from belady.planners import plan as make_plan
from belady.planners import traits_of
from belady.sections.losses import MATTERS, Losses

if TYPE_CHECKING:
    from belady.graph.inductor import Inductor


class Planning:
    """Asks the policy.

    Parameters
    ----------
    modules
        The models whose parameters the graphs take.
    inductor
        Makes the kernels of planned iterations; None: each op has its own.
    weigh
        See `belady.graph.admission.Admission.weigh`.

    Attributes
    ----------
    bits
        Notes where gradients can have other bits than plain PyTorch's.
    launching
        Has iterations launched as they were captured.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        policy: Policy,
        hardware: HardwareProfile,
        carrier: Carrier,
        inductor: Inductor | None,
        weigh: Callable[[Trace], int],
    ) -> None:
        self._inductor, self._weigh = inductor, weigh
        self._modules, self._policy = modules, policy
        self._hardware, self._carrier = hardware, carrier
        self.bits = Bits(exact=policy.exact)
        self._ordering = Ordering(policy.name)
        kernels = ITS_OWN
        if inductor is not None:
            kernels = Kernels(at_seams, seams_of, lambda op: is_fused(op.name))
        self._verification = Verification(policy, hardware, kernels)
        self._places = Places(carrier.device, modules)
        self.launching = Launching(modules, carrier, policy.budget.device_bytes, self._places)
        self._losses = Losses(carrier.device, policy.budget.device_bytes // MATTERS)
        self._floors: dict[tuple[Captured, bool], Force] = {}
        self._replayed = Replayed(exact=policy.exact)

    @property
    def notes(self) -> list[str]:
        """What a user should know of plans and kernels, one sentence each."""
        compiling = [] if self._inductor is None else self._inductor.notes
        return [
            *self._losses.said,
            *self._ordering.said,
            *self.bits.notes,
            *self._replayed.notes,
            *self._verification.notes,
            *self.launching.notes,
            *compiling,
        ]

    @property
    def recomputes(self) -> bool:
        """Whether the policy makes values again."""
        return traits_of(self._policy.name).recomputes

    @property
    def unwatched(self) -> bool:
        """Whether kernels under a plan are others than those that are watched."""
        return self._inductor is not None and self._carrier.device.type == "cuda"

    def _numerics(self, kind: Kind) -> tuple[str, ...]:
        """What can change a bit besides the settings of a plan."""
        kernels = () if self._inductor is None else ("inductor",)
        slices = ("sections",) if any(graph.sliced for graph in kind.graphs) else ()
        return (*kernels, *slices, *self.bits.numerics)

    def floor(self, graph: Captured, args: Sequence[Any], *, watched: bool) -> Force:
        """How a graph runs that no plan covers: what may move moves.

        Losses are in slices from now on where one of what the graph gives may lack room.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        self.launching.rest()
        known = self._floors.get((graph, watched))
        if known is None:
            self._ordering.begin(graph)
            try:
                known = self._floor(graph, args, watched)
            except InfeasibleBudgetError as refusal:
                if not self._ordering.may_help(graph):
                    raise
                known = self._in_order(graph, args, watched, refusal)
            trace, given = known.drawn.trace, bytes_of(graph.joint.tangents if graph.joint else ())
            leaves = self._weigh(trace)
            known = restrained(known, self._carrier.device, leaves if watched else 0)
            self._floors[graph, watched] = known
            self._losses.attach_for(trace, self._hardware, self._policy, given)
        return known

    def _in_order(
        self, graph: Captured, args: Sequence[Any], watched: bool, refusal: InfeasibleBudgetError
    ) -> Force:
        """The floor of a graph that is refused, in the coordinated order."""
        try:
            with self._ordering.tried(graph):
                return self._floor(graph, args, watched)
        except InfeasibleBudgetError as error:
            raise min(error, refusal, key=lambda it: it.smallest_bytes) from None

    def _floor(self, graph: Captured, args: Sequence[Any], watched: bool) -> Force:
        names = Names()
        lasting = Lasting.of(self._modules, names, self._carrier.device)
        forward = part_of(graph, 0, args, names, lasting)
        tangents: list[int | None] = [-1 - i for i in range(len(forward.joint.tangents))]
        backward = Part(0, "", forward.joint, forward.layout, False, tangents, {})
        seen = set(forward.inputs)
        unseen = sum(n for name, n in lasting.sizes.items() if name not in seen)
        drawn = draw([forward, backward], self._carrier.device, unseen)
        drawn = replace(drawn, trace=self._replayed.allowed(drawn.trace))
        plan = self._replayed.told(drawn.trace, self._first_plan(drawn))
        return Force.of([graph], drawn, plan, watched=watched)

    def _first_plan(self, drawn: Drawn) -> Plan:
        """The floor, or what the policy has that takes less."""
        policy = self._policy
        hardware = with_settled(drawn.trace, self._hardware, policy.name)
        try:
            return make_plan("floor", drawn.trace, hardware, policy.budget, exact=policy.exact)
        except InfeasibleBudgetError:
            return make_plan(policy.name, drawn.trace, hardware, policy.budget, exact=policy.exact)

    def plan(self, kind: Kind, drawn: Drawn) -> None:
        """Plan a kind of iteration that was observed.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of the policy fits.
        """
        drawn = replace(drawn, trace=self._replayed.allowed(drawn.trace))
        if self._inductor is not None:
            drawn = replace(drawn, trace=as_fused(drawn.trace))
        try:
            trial = self._verification.first(drawn.trace, *self._numerics(kind))
        except InfeasibleBudgetError:
            # A forward without a backward may be what an error of the user's has cut short.
            if kind.doubted or all_go_back(kind.order):
                raise
            kind.doubt()
            return
        self._put_in_force(kind, drawn, trial)

    def verify(self, kind: Kind) -> None:
        """Keep the plan that was measured, or put another in force."""
        force = kind.force
        if force is None:
            return
        trace, chosen = kind.conclude(self._verification, force.drawn.trace, self._numerics(kind))
        drawn = replace(force.drawn, trace=trace)
        kind.force = replace(force, drawn=drawn)
        run, measured = kind.trial, kind.measured
        tried = kind.prospect.way is Way.TRIED and not shows_more(chosen, measured)
        if tried and run is not None and measured is not None:
            self.launching.weigh(kind)
            if self._launches(kind, drawn, chosen or run, Ran(run, measured)):
                return
        if chosen is not None:
            self._put_in_force(kind, drawn, chosen)
            if chosen.measured is not None:
                # Nobody weighs any more whether it is launched.
                kind.prospect.way = Way.ISSUED

    def begin(self, kind: Kind) -> None:
        """An iteration of a kind begins: go by what the last one has shown."""
        self.launching.only(kind)
        if kind.starved:
            self._tighten(kind)
        elif kind.prospect.instead is not None and kind.prospect.way is Way.ISSUED:
            drawn, follows, ran = kind.prospect.instead
            kind.prospect.instead = None
            if not self._launches_again(kind, drawn, follows, ran):
                self._put_in_force(kind, drawn, follows)

    def _launches_again(self, kind: Kind, drawn: Drawn, follows: Trial, ran: Ran) -> bool:
        """The same after a capture; unpacked, where no plan leaves what that lacked."""
        prospect = kind.prospect
        wanted, tight = prospect.again is Again.WANTED, prospect.tight
        launches = wanted and self._launches(kind, drawn, follows, ran)
        if wanted and not launches and tight and prospect.packs:
            prospect.unpack()
            launches = self._launches(kind, drawn, follows, ran)
        prospect.answered(tight=tight)
        return launches

    def _launches(self, kind: Kind, drawn: Drawn, follows: Trial, ran: Ran) -> bool:
        """Put a plan in force for launches, where that may gain; ``follows`` comes otherwise.

        Where the host is late, or where a plan loses time: launches leave it more room.
        """
        prospect, plan = kind.prospect, follows.plan
        prospect.asked = True
        without, issued = freed(drawn.trace, follows.hardware, plan, ran.trial, ran.measured)
        late = gains(without, issued)
        if not late and not loses(drawn.trace, plan):
            prospect.way = Way.ISSUED
            return False
        prospect.beside.copies = fixed_bytes(kind)
        with suppress(InfeasibleBudgetError):
            trace, trial = self._verification.launched(
                drawn.trace,
                follows,
                prospect.beside.nbytes,
                *self._numerics(kind),
                packed=prospect.packs,
            )
            # What is issued goes by its host, now better, now worse: the usual counts.
            if gains(trial.plan.predicted_seconds, min(ran.measured.seconds, issued)):
                self._put_in_force(kind, replace(drawn, trace=trace), trial)
                if self.launching.may(kind):
                    # What it gains shows when it is launched. What it holds is known.
                    prospect.way, kind.stage = Way.TRIED, Stage.STEADY
                    prospect.instead, prospect.tight = (drawn, follows, ran), prospect.packs
                    return True
                self._put_in_force(kind, drawn, follows)
        prospect.issue(prospect.why or (NO_FASTER if late else ""))
        return False

    def _tighten(self, kind: Kind) -> None:
        """After the device ran out of memory: leave the allocator more room."""
        kind.starved, kind.prospect.instead = False, None
        force = kind.force
        if force is None:
            return
        chosen = kind.tighten(self._verification, force.drawn.trace, self._numerics(kind))
        if chosen is not None:
            self._put_in_force(kind, force.drawn, chosen)

    def close(self) -> None:
        """Leave losses as they are from now on, gradients and optimizer state where they are."""
        self._places.close()
        self.launching.close()
        self._losses.detach()

    def _put_in_force(self, kind: Kind, drawn: Drawn, trial: Trial) -> None:
        trial = replace(trial, plan=self._replayed.told(drawn.trace, trial.plan))
        fuse = None if self._inductor is None else self._inductor.fuse
        place = self._places.under(kind.graphs, drawn.trace, trial.plan, trial.hardware.allocator)
        kind.force = Force.of(kind.graphs, drawn, trial.plan, fuse=fuse, place=place)
        self.launching.begin(kind)
        kind.begin(trial, drawn.trace, self._carrier)
        if self._carrier.device.type == "cpu" and trial.measured is None:
            kind.counting = Force.of(kind.graphs, drawn, trial.plan, watched=True)
