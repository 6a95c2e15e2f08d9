"""What each iteration does next: observe it, plan it, verify the plan, or simply run it.

A *kind* of iteration is named by its first pass; `belady.measure.progress` says how one goes on.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack

import torch

from belady.eager.admission import Admission, Call
from belady.eager.immediate import Immediate, leaving
from belady.eager.iteration import Iteration
from belady.eager.kinds import Kind, Planning
from belady.eager.replay import Recipes
from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Workspace
from belady.ir.run import Run
from belady.ir.trace import Tier, Trace
from belady.measure.algorithms import Algorithms
from belady.measure.calls import Learner
from belady.measure.clock import NoClock, clock_for
from belady.measure.key import Key, parameters_of, walk
from belady.measure.monitor import Monitor, Sample
from belady.measure.observation import Observation
from belady.measure.observe import undisturbed
from belady.measure.restraint import Restrained
from belady.measure.stages import Policy, Stage
from belady.measure.trial import all_kept
from belady.measure.trials import Trials
from belady.measure.uninitialized import lasting_in
from belady.memory.algorithms import available
from belady.memory.apart import Apart
from belady.memory.carrier import Carrier
from belady.memory.lasting import Gradients, settle_state
from belady.planners import traits_of
from belady.planners.moves import MIN_BYTES

# The part of the budget from which on it is worth asking convolutions for less workspace.
_MATTERS = 8
# Kinds remembered; the oldest is forgotten (shapes that change without end).
_KINDS = 64


class Conductor:
    """Starts and ends iterations on one device.

    Parameters
    ----------
    hardware
        The machine.
    carrier
        Moves bytes.
    modules
        The roots; the list may grow.
    """

    def __init__(
        self,
        policy: Policy,
        hardware: HardwareProfile,
        carrier: Carrier,
        modules: list[torch.nn.Module],
    ) -> None:
        self.carrier = carrier
        self._modules = modules
        self._round_bytes = hardware.allocator.round_bytes
        self._monitor = Monitor(carrier.device, carrier)
        self._kinds: dict[Key, Kind] = {}
        self._persistent: set[int] = set()
        self._policy = policy
        self._admission = Admission(policy, hardware, carrier.device, modules)
        self.gate = self._admission.gate
        below = tuple(t for t in (Tier.HOST, Tier.DISK) if hardware.capacity(t) > 0)
        self._floor = Immediate(
            leaving(carrier), (*below, Tier.DEVICE), self._persistent, MIN_BYTES
        )
        fallback = self._floor.pack
        self._for_gradients = Apart(carrier.device)
        places = self._persistent, fallback, self._for_gradients.hold
        self._planning = Planning(policy, hardware, carrier, *places)
        self._latest: Kind | None = None
        self._last: Kind | None = None  # of which the iteration before was
        self._gradients = Gradients(self._for_gradients.copy)
        self._for_state = Apart(carrier.device)
        self._recording = False
        self._settled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def close(self) -> None:
        """Leave gradients where they are from now on.

        Raises
        ------
        ReplayError
            If the last iteration has used a wrong replay.
        """
        self._admission.close()
        self._gradients.close()
        self._for_gradients.close()
        self._for_state.close()
        with ExitStack() as stack:
            # All are asked, also where one raises.
            for kind in self._kinds.values():
                kind.piece.close()
                stack.callback(kind.settle)

    def record(self) -> None:
        """Take down every event of the next steady iteration."""
        self._recording = True

    def stepped(self, iteration: Iteration, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped, so that its state exists."""
        iteration.optimizer = optimizer
        settled = optimizer in self._settled or not optimizer.state
        if self.carrier.device.type == "cuda" and not settled:
            self._settled.add(optimizer)
            with iteration.aside():
                settle_state(optimizer, self._for_state.copy)

    def start(self, key: Key, module: torch.nn.Module, call: Call) -> Iteration:
        """Begin an iteration whose first pass is of kind ``key``: ``module`` called with ``call``.

        Raises
        ------
        InfeasibleBudgetError
            If this kind is new and no plan of it can fit.
        ReplayError
            If an iteration before has used a wrong replay.
        """
        self._admission.begin()
        if key in self._kinds and not self._admission.holds(key, module):
            self._kinds.pop(key).forget()
        kind = self._kinds.get(key)
        if kind is None:
            self._admission.admit(key, module, call)
            kind = self._kinds[key] = Kind()
            if len(self._kinds) > _KINDS:
                self._kinds.pop(next(iter(self._kinds))).forget()
        self._hear_of(kind)
        self._planning.check_replays(kind)
        if kind.starved:
            self._planning.tighten(kind)
        if kind.trial is None or kind.engine is not None:
            self._find_lasting(kind)
        else:
            self._leave_gradients()
        observation = self._observation(kind, key, module)
        if kind.engine is not None:
            kind.engine.on_bring = None if observation is None else observation.brought
        expected = kind.passes if kind.trial is not None else ()
        workspace = Workspace.UNCHANGED if kind.trial is None else kind.trial.plan.workspace
        iteration = Iteration(self._floor, kind.engine, expected, observation, workspace)
        sample = iteration.begin(self._monitor, level=kind.level(recording=self._recording))
        if kind.engine is not None:
            kind.engine.on_anchor = sample.tape.anchor if sample.tape is not None else None
        return iteration

    def starved(self) -> None:
        """The device ran out of memory in the iteration begun last: tighten before the next."""
        if self._last is not None:
            self._last.starved = True

    def enter(self, of: Iteration, key: Key, module: torch.nn.Module, call: Call) -> None:
        """A pass of kind ``key`` begins in an iteration.

        Raises
        ------
        InfeasibleBudgetError
            If its root runs in slices, this kind of call is new, and no plan of it can fit.
        """
        if not self._admission.holds(key, module):
            with of.aside():
                self._admission.admit(key, module, call)

    def _forget(self, root: int) -> None:
        """A root is admitted anew, and observed as it is then; so is all that calls it."""
        for key in [k for k, it in self._kinds.items() if root in it.roots or k[0] == root]:
            self._kinds.pop(key).forget()

    def _hear_of(self, kind: Kind) -> None:
        """Demand that replays were right, where iterations of ``kind`` would not in time."""
        last, self._last = self._last, kind
        if last is not None and last is not kind:
            last.settle()
        elif last is not None and last.engine is not None:
            last.engine.digests.demand_known()

    def _find_lasting(self, kind: Kind) -> None:
        modules = walk(self._modules)
        # Addresses of storages can change between iterations (`.to`, a swapped `.data`).
        self._persistent.clear()
        self._persistent.update([t.untyped_storage()._cdata for t in lasting_in(modules)])
        if self.carrier.device.type != "cuda":
            return
        most = kind.gradients_apart_most(self._policy.budget.device_bytes)
        if not self._gradients.attach(parameters_of(modules), most):
            self._leave_gradients()

    def _leave_gradients(self) -> None:
        self._gradients.rest()
        # Memory apart is idle now; a kind that has gradients there would take it anew.
        if not any(kind.apart for kind in self._kinds.values()):
            self._for_gradients.close()

    def finish(self, iteration: Iteration) -> tuple[Stage, Sample]:
        """End an iteration and decide what the next one of its kind does."""
        kind = self._kinds[iteration.passes[0]]
        stage = kind.stage
        try:
            sample, trace = iteration.finish()
        except BaseException:
            iteration.abort()
            raise
        self.carrier.sweep()
        passes = tuple(iteration.passes)
        if kind.trial is None:
            self._observed(kind, iteration, trace)
        elif passes != kind.passes or iteration.missed:
            kind.went_otherwise()
        else:
            self._recording = not kind.recorded(sample) and self._recording
            if kind.shows_beside and kind.trace is not None:
                kind.trace = kind.learn(kind.trace, trace)
            # Where an allocator counts, its peaks hold.
            watched = iteration.observation if self.carrier.device.type == "cpu" else None
            peak = watched.peak_bytes(self._round_bytes) if watched is not None else 0
            if kind.went_as_planned(sample, peak):
                self._planning.verify(kind)
        if kind.trial is not None:
            self._latest = kind
        return stage, sample

    def run(self, versions: tuple[tuple[str, str], ...]) -> Run | None:
        """Everything known of the kind of iteration that ran last under a plan, or None."""
        kind = self._latest
        if kind is None or kind.trace is None:
            return None
        notes = (*self._admission.said, *self._planning.notes)
        return kind.run(kind.trace, notes, versions)

    @property
    def least_bytes(self) -> int:
        """Smallest budget with room for an optimizer's state too; 0 where it is not known."""
        return self._admission.least_bytes

    @property
    def verified(self) -> bool | None:
        """Whether measured peaks kept to the budget; None before anything was verified."""
        return all_kept(kind.trial for kind in self._kinds.values())

    def _observation(self, kind: Kind, key: Key, module: torch.nn.Module) -> Observation | None:
        device = self.carrier.device
        if kind.watched:
            learns = kind.stage is Stage.TIMED and self._planning.may_replay()
            trials = Trials(Learner(kind.varying), clock_for(device)) if learns else None
            observation = Observation(device, clock_for(device), self._modules, trials)
            if leaves := self._admission.leaves_bytes(key, module):
                observation.recorder.issue = Restrained(device, leaves)
            if kind.stage is Stage.TIMED and self._asks_workspace():
                least = self._policy.budget.device_bytes // _MATTERS
                observation.recorder.algorithms = Algorithms(device, clock_for(device), least)
            return observation
        if kind.shows_beside:
            return Observation(device, clock_for(device), self._modules)
        if kind.stage is Stage.SETTLING and kind.measured is None and device.type == "cpu":
            # A CPU has no allocator that counts: the peak is seen by watching storages.
            return Observation(device, NoClock(), self._modules)
        return None

    def _asks_workspace(self) -> bool:
        """Whether the policy may ask convolutions for less workspace, and they can be."""
        asks = not self._policy.exact and traits_of(self._policy.name).spares_workspace
        return asks and available(self.carrier.device)

    def _observed(self, kind: Kind, iteration: Iteration, trace: Trace | None) -> None:
        passes, watched = tuple(iteration.passes), iteration.observation
        alike = kind.seen(alike=trace is not None and passes == kind.passes)
        if alike and trace is not None and watched is not None:
            again = self._admission.unsuited(passes, trace)
            if again is not None:
                self._forget(again)
                return
            recipes = Recipes.of(watched.recorder, kind.varying)
            if self._admission.is_cut(passes):
                kind.numerics = ("sections",)
            try:
                self._planning.plan(kind, undisturbed(trace, kind.warm), recipes)
            except InfeasibleBudgetError as error:
                again = self._admission.too_large(passes, trace, error)
                if again is None:
                    raise
                self._forget(again)
        else:
            kind.passes, kind.warm = passes, trace
