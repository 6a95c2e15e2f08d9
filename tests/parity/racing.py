"""An engine under the worst timing: copies that come late, memory that is reused at once."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import belady
from belady.eager.hooks import HookPair
from belady.eager.planned import Planned
from belady.eager.replay import Recipes
from belady.ir.encoding import encoding_of
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Assignment, Budget, Decision, Encode, Keep, Offload, Plan, Recompute
from belady.ir.replay import reasons, sources
from belady.ir.timeline import Lane
from belady.ir.trace import Tier, Trace
from belady.memory.carrier import Carrier
from belady.memory.fences import Fence
from belady.memory.lanes import CpuLanes
from belady.planners.replays import cheapest
from belady.simulate import simulate
from tests.support.memory import POISON, CarrierUnderTest, SlowCudaLanes, SlowFiles, ThreadLanes
from tests.support.models import Task
from tests.support.training import Step, Training

ROOM = 1 << 30
SECONDS = 0.0005


class ReusingLanes(ThreadLanes):
    """Lanes whose copies own nothing, as on a GPU: memory let go too early is someone else's.

    Until a copy-in has landed its target is poison. A source that is gone when its copy-out runs
    is copied as poison. A target that is gone would have been written over: `overwritten`.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.overwritten = 0

    def copy(self, lane: Lane, target: Tensor, source: Tensor, after: Iterable[Fence]) -> Fence:
        if lane is Lane.COPY_IN:
            target.fill_(POISON)
        return super().copy(lane, _Loose(target, self), _Loose(source, self), after)


class _Loose:
    """A tensor by its place in memory, which it does not keep alive."""

    def __init__(self, tensor: Tensor, lanes: ReusingLanes) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        self._lanes = lanes

    def tensor(self) -> Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        return torch.empty(0, dtype=torch.uint8).set_(storage, *self._place)

    def copy_(self, source: _Loose, *, non_blocking: bool) -> None:
        target, found = self.tensor(), source.tensor()
        if target is None:
            self._lanes.overwritten += 1
        elif found is None:
            target.fill_(POISON)
        else:
            target.copy_(found)


def hostile_carrier(kind: str) -> CarrierUnderTest:
    """Make a carrier for ``"direct"`` (CPU and disk), ``"threads"`` or ``"cuda"``."""
    files = SlowFiles(SECONDS)
    if kind == "direct":
        lanes: Any = CpuLanes(torch.device("cpu"))
    elif kind == "threads":
        lanes = ReusingLanes(SECONDS)
    else:
        lanes = SlowCudaLanes(torch.device("cuda", 0), SECONDS)
    device = "cuda" if kind == "cuda" else "cpu"
    return CarrierUnderTest(device, files=files, poisoned=True, lanes=lanes)


class Observed(NamedTuple):
    """What one steady iteration does, how its ops run again, and whose the storages are by name."""

    trace: Trace
    recipes: Recipes
    names: dict[int, tuple[int, str]]

    def recipes_for(self, training: Training) -> Recipes:
        """The same, for models that were made anew."""
        tensors = [_named(model) for model in training.models]
        owners = {
            storage: weakref.ref(tensors[model][name])
            for storage, (model, name) in self.names.items()
        }
        # Parameters in them are those of the models that were watched.
        calls = [
            [call._replace(numbers=None, alike=None) for call in calls]
            for calls in self.recipes.calls
        ]
        return replace(self.recipes, owners=owners, calls=calls)


def observed(task: Task, step: Step, device: str) -> Observed:
    """Watch the iteration at the floor."""
    training = Training(task, device)
    with belady.virtualize(training.models, ROOM, policy="hybrid") as vm:
        training.run(step, range(3))
        run = vm.run()
        assert vm._tracker.conductor is not None
        kind = vm._tracker.conductor._latest
    assert run is not None
    assert kind is not None
    known = {
        id(tensor): (number, name)
        for number, model in enumerate(training.models)
        for name, tensor in _named(model).items()
    }
    names = {
        storage: known[id(owner())]
        for storage, owner in kind.recipes.owners.items()
        if id(owner()) in known
    }
    return Observed(run.trace, kind.recipes, names)


def _named(model: torch.nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def random_plan(trace: Trace, kind: str, seed: int) -> Plan:
    """Any decision for every saved value.

    The times of each are in order, and that is all: many of these moves gain nothing, and the
    engine must still get them right.
    """
    tiers = [Tier.DISK] if kind == "direct" else [Tier.HOST, Tier.DISK]
    chance = random.Random(seed)
    kept = chance.choice([0.15, 0.5])
    assignments = [
        Assignment(
            value, Keep() if chance.random() < kept else _decision(trace, value, tiers, chance)
        )
        for value in trace.saved
        # cuDNN saves reserves of no bytes, which cannot move.
        if trace.storages[trace.values[value].storage].nbytes > 0
    ]
    return legal(trace, Plan(trace.fingerprint, "random/1", Budget(ROOM), tuple(assignments)))


def every_replay(trace: Trace, op: str = "") -> dict[int, Recompute]:
    """All that can be made again by a replay with ``op`` in it, none from another of them."""
    chosen: dict[int, Recompute] = {}
    needed = set[int]()
    for value in reversed(trace.saved):
        replay = None if value in needed else cheapest(trace, value)
        if replay is not None and any(f"aten.{op}" in trace.ops[it].name for it in replay.ops):
            chosen[value] = replay
            needed.update(sources(trace, replay))
    return chosen


def replaying(
    _name: str, trace: Trace, hardware: HardwareProfile, budget: Budget, **_: bool
) -> Plan:
    """In place of a policy's planner: makes again all that can be."""
    made = tuple(starmap(Assignment, every_replay(trace).items()))
    plan = legal(trace, Plan(trace.fingerprint, "some/1", budget, made))
    timeline = simulate(trace, hardware, plan)
    peak, seconds = timeline.peak(Tier.DEVICE), timeline.seconds
    return replace(plan, predicted_peak_bytes=peak, predicted_seconds=seconds)


def legal(trace: Trace, plan: Plan) -> Plan:
    """The plan with every value kept that cannot be made again beside the other decisions."""
    wrong = {
        value
        for value, decision in plan.decisions.items()
        if isinstance(decision, Recompute) and any(reasons(trace, value, plan.decisions))
    }
    assignments = (
        Assignment(it.value, Keep()) if it.value in wrong else it for it in plan.assignments
    )
    return replace(plan, assignments=tuple(assignments))


def _decision(trace: Trace, index: int, tiers: list[Tier], chance: random.Random) -> Decision:
    value = trace.values[index]
    first = value.first_save
    last = value.dropped if value.first_read is None else value.first_read
    replay = cheapest(trace, index) if chance.random() < 0.5 else None
    if replay is not None:
        return replay
    encoding = encoding_of(trace, index)
    if encoding is not None and chance.random() < 0.5:
        return Encode(*encoding, first, last)
    out, free, back, ready = sorted(_moment(first, last, chance) for _ in range(4))
    return Offload(chance.choice(tiers), out - 1, free, back, ready)


def _moment(first: int, last: int, chance: random.Random) -> int:
    """A boundary, more often than not at one of the ends, where the mistakes are."""
    return chance.choice([first, min(first + 1, last), last, chance.randint(first, last)])


@contextmanager
def engine_on(training: Training, engine: Planned) -> Iterator[None]:
    """Let the engine have the saves of every call of a root, as `virtualize` does."""
    passes, calls = count(), engine.calls
    pair = HookPair(engine.pack if calls is None else calls.around(engine.pack), engine.unpack)

    def enter(*_: Any) -> None:
        index = next(passes)
        engine.enter_pass(index)
        engine.may_lift(pair)
        pair.push()
        if calls is not None:
            calls.enter_pass(index)

    def leave(*_: Any) -> None:
        if calls is not None:
            calls.leave_pass()
        pair.pop()

    handles = [model.register_forward_pre_hook(enter) for model in training.models]
    handles += [model.register_forward_hook(leave, always_call=True) for model in training.models]
    engine.start_iteration()
    try:
        yield
        engine.finish_iteration()
    finally:
        for handle in handles:
            handle.remove()


def train(task: Task, step: Step, plan: Plan, seen: Observed, carrier: Carrier) -> Any:
    """Two iterations under the plan; gives the outcome and the engine."""
    training = Training(task, carrier.device.type)
    persistent = {
        tensor.untyped_storage()._cdata
        for model in training.models
        for tensor in (*model.parameters(), *model.buffers())
    }
    recipes = seen.recipes_for(training)
    engine = Planned(seen.trace, plan, carrier, persistent, recipes)
    for index in range(2):
        with engine_on(training, engine):
            training.run(step, [index])
    return training.outcome(), engine
