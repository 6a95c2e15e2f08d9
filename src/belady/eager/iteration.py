"""One iteration under way: which hooks each of its passes gets, and who watches it."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from time import perf_counter
from typing import Any

import torch

from belady.eager.content import unpack
from belady.eager.hooks import HookPair, Pack, Unpack, aside_from_compile
from belady.eager.immediate import Immediate
from belady.eager.planned import Planned
from belady.ir.collector import seldom_collected
from belady.ir.plan import Workspace
from belady.ir.trace import Phase, Trace
from belady.measure.calls import Calls
from belady.measure.key import Key
from belady.measure.monitor import Monitor, Sample
from belady.measure.observation import Observation, watched
from belady.memory.algorithms import beside


class Iteration:
    """From the first pass to the optimizer's step.

    Parameters
    ----------
    floor
        Hooks of passes that no plan covers.
    engine
        Carries out the plan; None when there is no plan or the plan moves nothing.
    expected
        Keys of the passes that the plan covers, in order.
    observation
        Watches the iteration, or None.
    workspace
        What the plan asks of convolutions.

    Attributes
    ----------
    passes
        Keys of the passes entered so far.
    optimizer
        The optimizer whose step ended it, once known.
    """

    def __init__(
        self,
        floor: Immediate,
        engine: Planned | None,
        expected: tuple[Key, ...],
        observation: Observation | None,
        workspace: Workspace = Workspace.UNCHANGED,
    ) -> None:
        self.passes: list[Key] = []
        self.optimizer: torch.optim.Optimizer | None = None
        self.observation = observation
        self._floor = floor
        self._engine = engine
        self._expected = expected
        self._pair: HookPair | None = None
        self._calls = _calls_of(engine, observation)
        self._workspace = workspace
        # Of the process, until the iteration is over. It can be lost with all that is managed.
        self._settings = ExitStack()
        weakref.finalize(self, self._settings.close).atexit = False
        if observation is not None:
            weakref.finalize(self, observation.stop).atexit = False
        self._monitor: Monitor | None = None
        self._sample: Sample | None = None
        self._entered = 0.0
        self._host_seconds = 0.0
        self._engine_seconds = 0.0  # of them, the engine's own
        self._hook_seconds = 0.0  # and what hooks took beside
        self._counts = self._lifted = False

    def begin(self, monitor: Monitor, level: int) -> Sample:
        """The first pass is about to be entered."""
        if self._engine is not None:
            self._engine.start_iteration()
        if self.observation is not None:
            self.observation.start()
        self._monitor = monitor
        self._counts = level == 1
        self._sample = monitor.begin(level)
        if self._workspace is Workspace.MEMORY:
            # The trials made cuDNN's lean choices; PERFORMANCE is what it chooses by itself.
            self._settings.enter_context(beside())
        # What is held for each save until backward is no garbage in the making. Were it found alive
        # in between, it would count as old, though it is gone by the end.
        self._settings.enter_context(seldom_collected())
        return self._sample

    def enter(self, key: Key, module: torch.nn.Module, call: tuple[Any, Any]) -> None:
        """A root is called: put the hooks of this pass on."""
        index = len(self.passes)
        self.passes.append(key)
        self._mark(Phase.FORWARD)
        covered = index < len(self._expected) and self._expected[index] == key
        if self._engine is not None:
            # A pass after an error: its gradients are asked for anew.
            self._engine.digests.forget()
        if self.observation is not None:
            self.observation.enter_pass(module, call)
        pair = self._hooks(index, covered)
        if pair is not None:
            pair.push()
        if self._calls is not None:
            self._calls.enter_pass(index)
        self._pair = pair
        self._engine_seconds -= self._engine.host_seconds if self._engine is not None else 0.0
        self._entered = perf_counter()

    def leave(self, *, whole: bool = False) -> None:
        """The root returned or raised: take them off.

        Parameters
        ----------
        whole
            Whether the pass was a block with forward and backward in it, which nothing tells apart.
        """
        self._host_seconds += perf_counter() - self._entered
        self._engine_seconds += self._engine.host_seconds if self._engine is not None else 0.0
        self._take_off()
        if not whole:
            self._mark(Phase.BACKWARD)
        self._floor.end_pass()
        if self.observation is not None:
            self.observation.leave_pass()

    def optimizer_begins(self) -> None:
        """The optimizer's step begins.

        Raises
        ------
        ReplayError
            If its gradients are known to be wrong.
        """
        if self._engine is not None:
            self._engine.digests.demand_equal()
        self._mark(Phase.OPTIMIZER)
        if self.observation is not None:
            self.observation.recorder.phase = Phase.OPTIMIZER

    def aside(self) -> AbstractContextManager[None]:
        """For work of belady's own in the middle of it."""
        return nullcontext() if self.observation is None else self.observation.recorder.aside()

    @property
    def missed(self) -> int:
        """Saves in this iteration that did not match the plan."""
        return self._engine.missed if self._engine is not None else 0

    def finish(self) -> tuple[Sample, Trace | None]:
        """The iteration is over; gives its measurement and, if it was watched, its Trace."""
        self._settings.close()
        if self._engine is not None:
            self._engine.finish_iteration()
        if self._monitor is None or self._sample is None:
            raise RuntimeError("an iteration was finished that had not begun")
        sample = self._monitor.end(self._sample)
        sample.host_seconds = self._host_seconds - self._engine_seconds - self._hook_seconds
        sample.hook_seconds = self._hook_seconds
        if self._engine is not None:
            sample.engine_seconds = self._engine.host_seconds
            sample.replay_seconds = self._engine.replay_seconds
        trace = self.observation.finish(self.optimizer) if self.observation is not None else None
        return sample, trace

    def abort(self) -> None:
        """The iteration came to nothing (an exception of the user's): leave no hook behind."""
        with ExitStack() as stack:
            # Each of these happens, whatever the others raise.
            stack.callback(self._settings.close)
            if self.observation is not None:
                stack.callback(self.observation.stop)
            if self._monitor is not None:
                stack.callback(self._monitor.cancel)
            stack.callback(self._floor.drop)
            self._take_off()

    def _mark(self, phase: Phase) -> None:
        """A phase begins, as a trace has them; after forward all that is no step is BACKWARD."""
        if self._sample is not None:
            self._sample.mark(phase)

    def _take_off(self) -> None:
        """Take hooks and modes of the pass off this thread. Idempotent."""
        pair, self._pair = self._pair, None
        try:
            if self._calls is not None:
                self._calls.leave_pass()
        finally:
            if pair is not None:
                pair.pop()

    def _hooks(self, index: int, covered: bool) -> HookPair | None:
        pack: Pack
        take: Unpack
        if not covered:
            pack, take = self._floor.pack, unpack
        elif self._engine is None:
            return None
        else:
            self._engine.enter_pass(index)
            pack, take = self._engine.pack, self._engine.unpack
        if self.observation is not None:
            pack, take = watched(self.observation.recorder, pack, take)
        if self._calls is not None:
            pack = self._calls.around(pack)
        engine = self._engine if covered and self.observation is None else None
        if engine is not None and self._counts:
            pack = self._counted(engine, pack)
        pair = HookPair(aside_from_compile(pack), aside_from_compile(take))
        self._lifted = engine is not None and engine.may_lift(pair)
        return pair

    def _counted(self, engine: Planned, pack: Pack) -> Pack:
        """``pack`` with what it takes beyond what the engine counts itself taken down.

        Only in a pass whose hooks are off now and then: else no value that is not kept puts any on.
        """

        def counted(tensor: torch.Tensor) -> Any:
            begun, before = perf_counter(), engine.host_seconds
            try:
                return pack(tensor)
            finally:
                if self._lifted:
                    self._hook_seconds += perf_counter() - begun - (engine.host_seconds - before)

        return counted


def _calls_of(engine: Planned | None, observation: Observation | None) -> Calls | None:
    if engine is not None:
        return engine.calls
    trials = None if observation is None else observation.recorder.trials
    return None if trials is None else trials.learner
