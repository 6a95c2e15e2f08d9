"""Plans for captured graphs: before one has run, and when an iteration was observed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from belady.errors import InfeasibleBudgetError
from belady.graph import convolutions
from belady.graph.beside import bytes_of, fixed_bytes
from belady.graph.bits import Bits
from belady.graph.calls import part_of
from belady.graph.captured import Captured
from belady.graph.kinds import Force, Kind, all_go_back
from belady.graph.launching import Launching, gains
from belady.graph.ops import is_fused
from belady.graph.ordering import Ordering
from belady.graph.parts import Drawn, Part
from belady.graph.placing import Places
from belady.graph.prospect import NO_FASTER, Run, Way, shows_more
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
from belady.planners import POLICIES
from belady.planners import plan as make_plan
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
        self._told: list[str] = []

    @property
    def notes(self) -> list[str]:
        """What a user should know of plans and kernels, one sentence each."""
        compiling = [] if self._inductor is None else self._inductor.notes
        return [
            *self._losses.said,
            *self._ordering.said,
            *self.bits.notes,
            *self._told,
            *self._verification.notes,
            *self.launching.notes,
            *compiling,
        ]

    @property
    def recomputes(self) -> bool:
        """Whether the policy makes values again."""
        return POLICIES[self._policy.name].recomputes

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
            known = restrained(known, self._carrier.device, watched * self._weigh(trace))
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
        drawn = self._may_run_again(draw([forward, backward], self._carrier.device, unseen))
        plan = self._telling(drawn, self._first_plan(drawn))
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
        drawn = self._may_run_again(drawn)
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
            if self._launches(kind, drawn, chosen or run, (run, measured)):
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
            instead, kind.prospect.instead = kind.prospect.instead, None
            tight = kind.prospect.tight
            again = any(self._launches(kind, *instead) for _ in kind.prospect.chances())
            kind.prospect.lacking_bytes = None if tight else 0
            if not again:
                self._put_in_force(kind, *instead[:2])

    def _launches(self, kind: Kind, drawn: Drawn, follows: Trial, run: Run) -> bool:
        """Put a plan in force for launches, where that may gain; ``follows`` comes otherwise.

        Where the host is late, or where a plan loses time: launches leave it more room.
        """
        prospect, plan = kind.prospect, follows.plan
        without, issued = freed(drawn.trace, follows.hardware, plan, *run)
        if not (late := gains(without, issued)) and not loses(drawn.trace, plan):
            prospect.asked, prospect.way = True, Way.ISSUED
            return False
        prospect.counted_bytes = fixed_bytes(kind)
        beside = prospect.beside_bytes
        prospect.asked = False
        try:
            numerics = self._numerics(kind)
            trace, trial = self._verification.launched(
                drawn.trace, follows, beside, *numerics, packed=prospect.packs
            )
            # What is issued goes by its host, now better, now worse: the usual counts.
            if gains(trial.plan.predicted_seconds, min(run[1].seconds, issued)):
                self._put_in_force(kind, replace(drawn, trace=trace), trial)
                if prospect.way is Way.TRIED:
                    # What it gains shows when it is launched. What it holds is known.
                    prospect.instead, kind.stage = (drawn, follows, run), Stage.STEADY
                    prospect.tight = prospect.packs
                else:
                    self._put_in_force(kind, drawn, follows)
        except InfeasibleBudgetError:
            pass
        prospect.asked = True
        if prospect.instead is None:
            prospect.issue(prospect.why or late * NO_FASTER)
        return prospect.instead is not None

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

    def _may_run_again(self, drawn: Drawn) -> Drawn:
        """What was drawn, without replays that ``exact`` forbids."""
        return replace(drawn, trace=convolutions.kept(drawn.trace)) if self._policy.exact else drawn

    def _telling(self, drawn: Drawn, plan: Plan) -> Plan:
        """The plan, and what it says of its replays."""
        plan = convolutions.told(drawn.trace, plan)
        if convolutions.REPLAYED in plan.numerics and convolutions.NOTE not in self._told:
            self._told.append(convolutions.NOTE)
        return plan

    def _put_in_force(self, kind: Kind, drawn: Drawn, trial: Trial) -> None:
        trial = replace(trial, plan=self._telling(drawn, trial.plan))
        fuse = None if self._inductor is None else self._inductor.fuse
        place = self._places.under(kind.graphs, drawn.trace, trial.plan, trial.hardware.allocator)
        kind.force = Force.of(kind.graphs, drawn, trial.plan, fuse=fuse, place=place)
        self.launching.begin(kind)
        kind.begin(trial, drawn.trace, self._carrier)
        if self._carrier.device.type == "cpu" and trial.measured is None:
            kind.counting = Force.of(kind.graphs, drawn, trial.plan, watched=True)
