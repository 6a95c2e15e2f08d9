"""Iterations that are captured and launched in one piece train as plain PyTorch does."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import belady
from belady.errors import StaleValueError
from belady.graph import capturing, launching, planning, prospect, told
from belady.graph.joint import whole_graph
from belady.graph.kinds import Kind
from belady.graph.launchable import why_not
from belady.graph.launched import Launched
from belady.graph.launching import Launching
from belady.graph.layout import Layout
from belady.graph.placing import Places
from belady.graph.prospect import Prospect
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.timeline import Measured
from belady.ir.trace import Phase, Tier, Trace
from belady.measure import verification
from belady.measure.monitor import Monitor, Sample
from belady.measure.trial import Trial
from belady.measure.unissued import Ask
from belady.measure.verification import Verification
from belady.memory.launches import Launches
from belady.report import facts
from belady.report.text import describe
from belady.simulate import simulate
from belady.simulate.holes import Holes, divisions
from belady.simulate.reassigned import reassigned
from belady.simulate.stretch import Event
from tests.parity.racing import random_plan
from tests.support.launches import DIVISIONS, WAYS, Rerun, launching_on_a_cpu
from tests.support.models import CLASSES, TIED, ResidualCNN, SmallGPT, Task
from tests.support.models import CNN as DEEP_CNN
from tests.support.models import GPT as DEEP_GPT
from tests.support.training import (
    Step,
    Training,
    accumulating,
    autocast,
    by_hand,
    clipping,
    differences,
    evaluating,
    plain,
    repeatable,
    short_at_the_end,
    zeroing_first,
)

ITERATIONS = range(16)
# Iteration that is launched first: two are observed, one settles, two are verified, and one runs
# under the plan for launches.
FIRST = 6


def one_block_cnn() -> list[nn.Module]:
    model = ResidualCNN()
    del model.layers[5]
    return [model]


def one_block_gpt() -> list[nn.Module]:
    model = SmallGPT()
    del model.blocks[1]
    return [model]


# Each test compiles its model anew, which takes most of its time: a block of each kind does.
CNN = replace(DEEP_CNN, models=one_block_cnn)
GPT = replace(DEEP_GPT, models=one_block_gpt)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with repeatable():
        yield
    torch._dynamo.reset()


def train(task: Task, step: Step, policy: str, monkeypatch: pytest.MonkeyPatch) -> list[Rerun]:
    """Train and compare; what stood for graphs."""
    expected = Training(task).run(step, ITERATIONS).outcome()
    training = Training(task)
    made = launching_on_a_cpu(monkeypatch, training.models)
    with belady.virtualize(training.models, "1GiB", policy=policy, engine="graph"):
        training.run(step, ITERATIONS)
    assert differences(expected, training.outcome()) == []
    return made


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "floor"])
@pytest.mark.parametrize("task", [CNN, GPT, TIED], ids=lambda it: it.name)
def test_launches_train_as_plain_pytorch(
    task: Task, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = train(task, plain, policy, monkeypatch)
    assert only.launched >= 8


@pytest.mark.parametrize(
    "step",
    [autocast, by_hand, clipping, evaluating, short_at_the_end, zeroing_first],
)
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all"])
def test_ways_to_write_an_iteration(
    policy: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(CNN, step, policy, monkeypatch)


@pytest.mark.parametrize("policy", ["baseline", "vdnn_all"])
def test_what_backward_is_given_is_given_again_each_time(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of the pool, so that forward writes over it."""
    forward, poisoned = Launched._forward, list[Tensor]()

    def poisons(self: Launched, *given: Any) -> Any:
        made = forward(self, *given)
        for it in self._tangents:
            it.fill_(math.nan)
            poisoned.append(it)
        return made

    monkeypatch.setattr(Launched, "_forward", poisons)
    (only,) = train(CNN, plain, policy, monkeypatch)
    assert only.launched >= 8
    assert poisoned


def suddenly_twice(training: Training, index: int) -> list[Tensor]:
    """A second backward through the same call, once launches have begun."""
    loss = training.loss(index)
    if index == 11:
        loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def moving_a_parameter(training: Training, index: int) -> list[Tensor]:
    """A parameter lies elsewhere from some iteration on."""
    if index == 11:
        weight = training.model.get_parameter("layers.0.weight")
        weight.data = weight.data.clone()
    return plain(training, index)


def precisely(training: Training, index: int) -> list[Tensor]:
    """Another setting of torch's that kernels depend on."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = index >= 11
    try:
        return plain(training, index)
    finally:
        torch.backends.cudnn.benchmark = before


@pytest.mark.parametrize("step", [suddenly_twice, moving_a_parameter, precisely])
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all"])
def test_what_a_launch_would_not_do_is_issued(
    policy: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = train(CNN, step, policy, monkeypatch)
    assert made[0].launched >= 6
    if step is not suddenly_twice:
        # What was captured is given up, and the next is captured when all has been quiet.
        assert len(made) == 2
        assert made[0].launched == 2 * (11 - FIRST)


def at_random(
    _name: str, trace: Trace, hardware: HardwareProfile, budget: Budget, *, seed: int, **_: bool
) -> Plan:
    """In place of a policy's planner: any decisions."""
    plan = random_plan(trace, "direct", seed)
    timeline = simulate(trace, hardware, plan)
    return replace(
        plan,
        budget=budget,
        predicted_peak_bytes=timeline.peak(Tier.DEVICE),
        predicted_seconds=timeline.seconds,
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("task", [CNN, GPT], ids=lambda it: it.name)
def test_any_plan_can_be_launched(task: Task, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "make_plan", partial(at_random, seed=seed))
    # All but one are plain iterations, before that one and after it, and are launched.
    made = train(task, suddenly_twice, "vdnn_all", monkeypatch)
    assert made[0].launched >= 2 * (len(ITERATIONS) - FIRST - 1)


def all_in_backward(
    trace: Trace, hardware: HardwareProfile, _boundaries: Sequence[int], ask: Ask, *_: Ask
) -> tuple[Plan, HardwareProfile]:
    """In place of `for_launches`: no copy goes out before backward, where that is legal."""
    plan, hardware = ask(hardware)
    begins = [op.phase for op in trace.ops].index(Phase.BACKWARD)
    for place, it in enumerate(plan.assignments):
        if isinstance(it.decision, Offload):
            later = replace(it.decision, copy_out_after=begins - 1, free_at=begins)
            moved = replace(it, decision=later)
            others = [*plan.assignments[:place], moved, *plan.assignments[place + 1 :]]
            plan = reassigned(trace, hardware, plan, others) or plan
            sent_late.append(plan.assignments[place] == moved)
    return plan, hardware


sent_late: list[bool] = []


@pytest.mark.parametrize("step", [suddenly_twice, autocast])
@pytest.mark.parametrize("task", [CNN, GPT], ids=lambda it: it.name)
def test_copies_may_go_out_in_backward(
    task: Task, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_late.clear()
    monkeypatch.setattr(verification, "for_launches", all_in_backward)
    made = train(task, step, "vdnn_all", monkeypatch)
    assert made[0].launched >= 6
    assert sum(sent_late) >= 3


def zeroing_after(training: Training, index: int) -> list[Tensor]:
    """Gradients of the step before are there while forward runs."""
    loss = training.loss(index)
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    return [loss]


@pytest.mark.parametrize("step", [zeroing_after, accumulating])
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all"])
def test_gradients_may_be_there_when_forward_begins(
    policy: str, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    (only,) = train(CNN, step, policy, monkeypatch)
    assert only.launched >= 2 * (len(ITERATIONS) - FIRST)


def keeping(training: Training, index: int) -> list[Tensor]:
    """Results and gradients of every iteration are looked at in later ones."""
    x, y = training.batch(index)
    given = training.model(x)
    loss = training.task.loss(given, y)
    loss.backward()
    training.optimizer.step()
    if index % 5 == 0:
        kept.append((given, given.detach().clone()))
        kept.extend((it.grad, it.grad.clone()) for it in training.model.parameters())
    training.optimizer.zero_grad()
    return [loss]


kept: list[tuple[Tensor, Tensor]] = []


def test_what_is_given_out_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    kept.clear()
    (first, *_) = train(CNN, keeping, "vdnn_all", monkeypatch)
    assert first.launched > 0
    assert all(torch.equal(it, before) for it, before in kept)


@pytest.mark.parametrize(
    ("without", "loses", "asked"),
    [(0.99, False, False), (0.97, False, True), (0.99, True, True)],
)
def test_launches_are_planned_for_only_where_the_host_is_late_or_time_is_lost(
    without: float, loses: bool, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gains, found, launched = launching._GAINS, list[Plan](), Verification.launched

    def noted(self: Verification, *given: Any, **named: Any) -> Any:
        trace, trial = launched(self, *given, **named)
        found.append(trial.plan)
        return trace, trial

    def freed(*_: Any) -> tuple[float, float]:
        monkeypatch.setattr(launching, "_GAINS", gains)
        return without, 1.0

    monkeypatch.setattr(Verification, "launched", noted)
    monkeypatch.setattr(planning, "freed", freed)
    monkeypatch.setattr(planning, "loses", lambda *_: loses)
    train(CNN, plain, "vdnn_all", monkeypatch)
    assert bool(found) is asked


def test_launches_that_gain_nothing_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Rerun] = []
    concluded = Launching._conclude

    def slower(self: Launching, kind: Kind, launched: Launched) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launching, "_GAINS", 1.0)
            concluded(self, kind, launched)

    monkeypatch.setattr(Launching, "_conclude", slower)
    made = train(CNN, plain, "vdnn_all", monkeypatch)
    # Once, and then no more.
    assert [it.launched for it in made] == [2 * 4]


def test_what_holds_one_launch_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    summarize = launching.summarize

    def held_up(samples: Sequence[Sample], *rest: Any) -> Measured:
        return replace(
            summarize(samples, *rest), seconds=median([math.inf, *[0.0] * (len(samples) - 1)])
        )

    monkeypatch.setattr(launching, "summarize", held_up)
    (only,) = train(CNN, plain, "vdnn_all", monkeypatch)
    assert only.launched >= 8


@pytest.mark.parametrize(
    ("nbytes", "said"), [(30 << 20, []), (60 << 20, ["60.00 MiB are left to"])]
)
def test_memory_that_only_a_step_uses_is_told_of(
    nbytes: int, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Monitor.end

    def ended(self: Monitor, sample: Sample) -> Sample:
        sample.stepping_bytes = nbytes
        return end(self, sample)

    monkeypatch.setattr(Monitor, "end", ended)
    training = Training(CNN)
    launching_on_a_cpu(monkeypatch, training.models)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert [it.partition(" the optimizer's")[0] for it in run.notes if "fused=True" in it] == said


def asked_to_leave(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that plans for launches are to leave, as each is asked for."""
    asked: list[int] = []
    planned = Verification.launched

    def note(self: Verification, *given: Any, **named: Any) -> Any:
        asked.append(given[2])
        return planned(self, *given, **named)

    monkeypatch.setattr(Verification, "launched", note)
    return asked


def first_one_lacks(asked: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have what is captured under the first plan that is asked for lack room."""
    begin = Rerun.__init__

    def lacking(self: Rerun, *given: Any) -> None:
        begin(self, *given)
        self.reserved = (1 << 30) - 5 if len(asked) == 1 else 0

    monkeypatch.setattr(Rerun, "__init__", lacking)


def test_a_capture_that_lacks_room_is_tried_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = asked_to_leave(monkeypatch)
    first_one_lacks(asked, monkeypatch)
    runs, freed = list[Trial](), planning.freed

    def noted(trace: Trace, hardware: Any, plan: Plan, run: Trial, measured: Any) -> Any:
        runs.append(run)
        return freed(trace, hardware, plan, run, measured)

    monkeypatch.setattr(planning, "freed", noted)
    *tried, last = train(CNN, plain, "vdnn_all", monkeypatch)
    assert [it.launched for it in tried] == [0] * WAYS
    assert last.launched >= 10
    # Both plans are weighed by what has run, which none of them has.
    assert len(runs) == 2
    assert runs[0] is runs[1]
    assert runs[0].measured is not None
    # What it lacked is left in addition: all that is needed between launches but 5 bytes.
    assert 0 < asked[1] - asked[0] < asked[0]


def another(trial: Trial) -> Trial:
    """A plan that was not measured, with the same decisions."""
    return replace(trial, plan=replace(trial.plan), measured=None)


@pytest.mark.parametrize("calm", [False, True])
def test_launches_are_weighed_when_an_iteration_without_flushes_has_been_seen(
    calm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What flushes have held up says little of kernels and links, if another plan is to follow."""
    verified, chosen = Verification.verified, Verification.chosen
    flushes, asked = list[int](), list[int]()
    launched = Verification.launched

    def flushing(self: Verification, *given: Any) -> Trial:
        trial = verified(self, *given)
        assert trial.measured is not None
        flushes.append(0 if calm and flushes else 3)
        return replace(trial, measured=replace(trial.measured, allocation_retries=flushes[-1]))

    def other(
        self: Verification, trace: Trace, tried: Sequence[Trial], *given: Any
    ) -> tuple[Trace, Trial]:
        # Another plan until the last that may be measured.
        trace, found = chosen(self, trace, tried, *given)
        return trace, another(tried[0]) if len(tried) < 3 else found

    def note(self: Verification, *given: Any, **named: Any) -> Any:
        asked.append(len(flushes))
        return launched(self, *given, **named)

    monkeypatch.setattr(Verification, "verified", flushing)
    monkeypatch.setattr(Verification, "chosen", other)
    monkeypatch.setattr(Verification, "launched", note)
    train(CNN, plain, "vdnn_all", monkeypatch)
    assert asked == [2 if calm else 3]


def test_nothing_is_launched_that_nobody_has_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that comes back after one on disk was measured while weighing was put off."""
    verified = Verification.verified
    asked = list[int]()

    def flushing(self: Verification, *given: Any) -> Trial:
        trial = verified(self, *given)
        assert trial.measured is not None
        return replace(trial, measured=replace(trial.measured, allocation_retries=3))

    def other(
        self: Verification, trace: Trace, tried: Sequence[Trial], *given: Any
    ) -> tuple[Trace, Trial]:
        asked.append(len(tried))
        on_disk = len(tried) == 1
        # Where there is no other tier, that one counts as such.
        tiers = {Tier.HOST} if on_disk else {Tier.HOST, Tier.DISK}
        monkeypatch.setattr(launching, "_TIERS", tiers)
        return trace, another(tried[0]) if on_disk else tried[0]

    monkeypatch.setattr(Verification, "verified", flushing)
    monkeypatch.setattr(Verification, "chosen", other)
    assert train(CNN, plain, "vdnn_all", monkeypatch) == []
    assert asked == [1, 2]


def test_another_kind_of_iteration_has_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Training(CNN).run(plain, ITERATIONS).run(last, range(2)).outcome()
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    captured = noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
        assert captured[0]._gradients
        # Another size, which is observed first.
        training.run(last, range(2))
        assert not captured[0]._gradients
    assert differences(expected, training.outcome()) == []


def last(training: Training, index: int) -> list[Tensor]:
    """A batch of fewer samples."""
    loss = training.loss(index, 3)
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def test_what_cannot_be_captured_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Rerun, issue: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Rerun, "capture", refuse)
    made = train(CNN, plain, "vdnn_all", monkeypatch)
    assert [it.launched for it in made] == [0]


def test_what_may_still_change_is_not_called_steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for that measures, and another plan takes seconds to compile."""
    phases: list[str] = []
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)

    def refuse(self: Rerun, issue: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(Rerun, "capture", refuse)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        vm.listeners.append(lambda stats: phases.append(stats.phase))
        training.run(plain, range(FIRST, FIRST + 20))
    first = phases.index("steady")
    assert {*phases[first:]} == {"steady"}
    # It is tried twice.
    assert phases[:first].count("verified") > 4


def test_a_capture_that_fails_half_way_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No garbage is left for a collection: it would have the memory that the iteration needs."""
    capture, init = Rerun.capture, Launched.__init__
    begun: list[weakref.ref[Launched]] = []

    def fail(self: Rerun, issue: Any) -> Any:
        if self._known:
            raise RuntimeError("operation failed due to a previous error during capture")
        return capture(self, issue)

    def note(self: Launched, *given: Any) -> None:
        begun.append(weakref.ref(self))
        init(self, *given)

    monkeypatch.setattr(Rerun, "capture", fail)
    monkeypatch.setattr(Launched, "__init__", note)
    gc.disable()
    try:
        train(CNN, plain, "vdnn_all", monkeypatch)
        assert [it() for it in begun] == [None]
    finally:
        gc.enable()


def test_what_lacks_room_when_it_is_captured_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rerun, "reserved", 1 << 40)
    made = train(CNN, plain, "vdnn_all", monkeypatch)
    assert [it.launched for it in made] == [0] * WAYS


@pytest.mark.parametrize("failing", [1, 2, WAYS - 1])
def test_a_capture_whose_blocks_do_not_fit_begins_with_other_holes(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    holes: list[Holes | None] = []
    begin = Rerun.__init__

    def lacking(self: Rerun, *given: Any) -> None:
        begin(self, *given)
        self.reserved = 1 << 30 if len(holes) < failing else 0
        holes.append(self.holes)

    monkeypatch.setattr(Rerun, "__init__", lacking)
    *tried, last = train(CNN, plain, "vdnn_all", monkeypatch)
    # Of one plan, each in another way.
    assert holes == [None, *DIVISIONS][: failing + 1]
    assert not any(it.launched for it in tried)
    assert last.launched >= 10


def test_what_is_captured_again_begins_with_what_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    training = Training(CNN)
    made, begin = launching_on_a_cpu(monkeypatch, training.models), Rerun.__init__

    def lacking(self: Rerun, *given: Any) -> None:
        begin(self, *given)
        self.reserved = 1 << 30 if len(made) < 2 else 0

    monkeypatch.setattr(Rerun, "__init__", lacking)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
        # Something else runs, which has the memory meanwhile.
        look(training)
        training.run(plain, ITERATIONS)
    *tried, before, again = made
    assert len(tried) == 2
    assert before.holes == again.holes == DIVISIONS[1]
    assert before.launched
    assert again.launched


def test_for_longer_than_another_plan_would_take_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Rerun, "reserved", 1 << 40)
    training = Training(CNN)
    made = launching_on_a_cpu(monkeypatch, training.models)
    monkeypatch.setattr(capturing, "_MOST_S", -1.0)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
    assert [it.holes for it in made] == [None]


def test_the_least_that_was_lacking_is_what_another_plan_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacking: list[int] = []
    failed = Prospect.failed

    def note(self: Prospect, nbytes: int, copied_bytes: int) -> None:
        lacking.append(nbytes)
        failed(self, nbytes, copied_bytes)

    begin, reserved = Rerun.__init__, iter([9, 3, 5, *[7] * 40])

    def over(self: Rerun, *given: Any) -> None:
        begin(self, *given)
        self.reserved = (1 << 30) + next(reserved)

    monkeypatch.setattr(Prospect, "failed", note)
    monkeypatch.setattr(Rerun, "__init__", over)
    train(CNN, plain, "vdnn_all", monkeypatch)
    first, second = lacking
    assert second - first == 7 - 3


def test_what_was_lacking_is_known_where_another_way_fails_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    planned, capture = Verification.launched, Rerun.capture

    def note(self: Verification, *given: Any, **named: Any) -> Any:
        asked.append(given[2])
        return planned(self, *given, **named)

    def fails(self: Rerun, issue: Any) -> Any:
        if self.holes is not None:
            raise RuntimeError("cannot be captured")
        return capture(self, issue)

    monkeypatch.setattr(Verification, "launched", note)
    monkeypatch.setattr(Rerun, "capture", fails)
    monkeypatch.setattr(Rerun, "reserved", (1 << 30) - 5)
    made = train(CNN, plain, "vdnn_all", monkeypatch)
    # Both plans, each in two ways.
    assert [it.holes for it in made] == [None, DIVISIONS[0]] * 2
    assert asked[1] > asked[0]


def test_a_capture_that_holds_too_much_is_not_tried_in_other_ways(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = Rerun.__init__

    def lacking(self: Rerun, *given: Any) -> None:
        begin(self, *given)
        self.reserved = self.peak_bytes = 1 << 40

    monkeypatch.setattr(Rerun, "__init__", lacking)
    assert [it.launched for it in train(CNN, plain, "vdnn_all", monkeypatch)] == [0]


def through_views(training: Training, index: int) -> list[Tensor]:
    """Gradients are zeroed through views that were taken of them once."""
    loss = training.loss(index)
    if views:
        torch._foreach_zero_(views)
    else:
        training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    if index == 9:
        views.extend(it.grad.view(-1) for it in training.model.parameters())
    return [loss]


views: list[Tensor] = []


def around_forward(training: Training, index: int) -> list[Tensor]:
    """A setting of torch's that holds for forward, and not for backward."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = not before
    loss = training.loss(index)
    torch.backends.cudnn.benchmark = before
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


def moved_in_between(training: Training, index: int) -> list[Tensor]:
    """Parameters lie elsewhere, with other numbers, when backward comes."""
    loss = training.loss(index)
    if index >= 10:
        for parameter in training.model.parameters():
            parameter.data = parameter.data * 1.5
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad()
    return [loss]


@pytest.mark.parametrize(
    ("step", "launched"),
    [
        # Until somebody has views.
        (through_views, 2 * (10 - FIRST)),
        # Every forward, and no backward.
        (around_forward, len(ITERATIONS) - FIRST),
        # All until then, and that forward.
        (moved_in_between, 2 * (10 - FIRST) + 1),
    ],
)
def test_what_backward_finds_is_as_it_was_captured(
    step: Step, launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    views.clear()
    expected = Training(CNN).run(step, ITERATIONS).outcome()
    views.clear()
    made = launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(step, ITERATIONS)
    assert differences(expected, training.outcome()) == []
    assert made[0].launched == launched


@pytest.mark.parametrize("what", ["input", "result", "parameter"])
def test_what_is_changed_in_place_is_an_error_as_ever(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching_on_a_cpu(monkeypatch, (training := Training(SATURATED)).models)
    captured = noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy="baseline", engine="graph"):
        training.run(plain, ITERATIONS)
        assert captured
        x, _ = training.batch(0)
        given = training.model(x)
        with torch.no_grad():
            if what == "parameter":
                training.model.get_parameter("2.weight").mul_(2)
            else:
                (x if what == "input" else given).mul_(2)
        with pytest.raises(StaleValueError):
            given.sum().backward()


SATURATED = Task(
    "saturated",
    lambda: [nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, CLASSES), nn.Sigmoid())],
    CNN.batch,
    CNN.loss,
)


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(768, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1)).mean(0, keepdim=True).expand(len(x), -1)


def test_a_result_that_repeats_its_bytes_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("expanded", lambda: [Expanded()], CNN.batch, CNN.loss)
    assert train(task, plain, "vdnn_all", monkeypatch) == []


def test_numbers_that_the_host_makes_are_issued() -> None:
    def draws(x: Tensor, scale: Tensor) -> list[Tensor]:
        return [x + (torch.rand(()) < 0.8).float() * torch.sin(x * scale)]

    with FakeTensorMode():
        args = torch.empty(8, 16, device="cuda:0"), torch.empty(16, device="cuda:0")
        joints = [whole_graph(make_fx(it, tracing_mode="real")(*args)) for it in (draws, still)]
        device = torch.device("cuda", 0)
        said = [why_not(it, Layout.of(it, device), args, set()) for it in joints]
    assert said == ["not all of the graph is on one device", ""]


def still(x: Tensor, scale: Tensor) -> list[Tensor]:
    return [x + torch.sin(x * scale)]


def looking(training: Training, index: int) -> list[Tensor]:
    """A call without gradients in each iteration."""
    look(training)
    return plain(training, index)


def in_turn(training: Training, index: int) -> list[Tensor]:
    """Batches of two sizes, in turn."""
    return last(training, index) if index % 2 else plain(training, index)


def hoarding(training: Training, index: int) -> list[Tensor]:
    """Gradients of each iteration are kept until the next one."""
    loss = training.loss(index)
    loss.backward()
    training.optimizer.step()
    hoard[:] = [it.grad for it in training.model.parameters() if it.grad is not None]
    training.optimizer.zero_grad()
    return [loss]


hoard: list[Tensor] = []


@pytest.mark.parametrize("step", [looking, in_turn, hoarding])
def test_what_cannot_gain_is_tried_a_few_times(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    captured = noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        phases: list[str] = []
        vm.listeners.append(lambda stats: phases.append(stats.phase))
        training.run(step, range(100))
        assert len(captured) <= 6
        assert phases[-1] == "steady"
        # What was measured is what runs.
        assert vm.verified
        assert told.NOTE not in vm.report()
        assert prospect.OTHERS in vm.report()


@pytest.mark.parametrize("step", [hoarding, in_turn])
def test_what_ran_before_comes_back_when_launches_end(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, ITERATIONS)
        assert told.NOTE in vm.report()
        launched = vm.run()
        training.run(step, range(100))
        # Of the kind that ran before.
        training.run(plain, [0])
        assert told.NOTE not in vm.report()
        issued = vm.run()
    assert launched is not None
    assert issued is not None
    assert issued.measured != launched.measured


@pytest.mark.parametrize("asked", [0, 4, 7, 12])
def test_events_are_recorded_whenever_they_are_asked_for(
    asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    captured = noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, range(asked))
        vm.record()
        training.run(plain, range(asked, 24))
        run = vm.run()
    assert captured
    assert run is not None
    assert run.measured is not None
    assert run.measured.spans
    # Waits are those of what was recorded, which no launch is.
    assert facts.waited(run) is None
    assert "issued op by op" in describe(run)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Launched]:
    """All that is captured from now on."""
    found: list[Launched] = []
    captured = Launching._captured

    def note(self: Launching, *given: Any) -> Launched | None:
        made = captured(self, *given)
        found.extend([] if made is None else [made])
        return made

    monkeypatch.setattr(Launching, "_captured", note)
    return found


def look(training: Training) -> None:
    with torch.no_grad():
        training.model(training.batch(99)[0])


def test_memory_for_gradients_is_set_aside_where_they_are_issued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Places, "rest", lambda self: said.append("rest"))
    monkeypatch.setattr(Places, "again", lambda self: said.append("again"))
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, range(FIRST))
        assert said == []
        training.run(plain, range(FIRST, FIRST + 4))
        assert said == ["rest"]
        look(training)
        assert said == ["rest", "again"]


def test_memory_goes_before_anything_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    launching_on_a_cpu(monkeypatch, (training := Training(CNN)).models)
    captured = noted(monkeypatch)
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
        # What is left of an iteration does not hold it.
        left = training.loss(3)
        left.backward()
        training.optimizer.zero_grad()
        (launched,) = captured
        assert launched._gradients
        look(training)
        assert not launched._gradients
        assert not launched._saved
        # Nor while a backward is owed, which still comes out right.
        training.run(plain, ITERATIONS[:3])
        owed = training.loss(3)
        look(training)
        assert captured[-1]._gradients
        owed.backward()
        assert not captured[-1]._gradients
    assert torch.equal(left, owed) is False


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ["graph", "inductor"])
@pytest.mark.parametrize("policy", ["baseline", "vdnn_all", "floor", "hybrid"])
@pytest.mark.parametrize("task", [CNN, GPT, TIED], ids=lambda it: it.name)
def test_launches_of_a_gpu_train_as_plain_pytorch(
    task: Task, policy: str, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    replayed: list[None] = []
    replay = torch.cuda.CUDAGraph.replay
    outcomes = []
    for launches in (False, True):
        monkeypatch.setattr(launching, "captures", lambda device, it=launches: it)
        monkeypatch.setattr(
            torch.cuda.CUDAGraph, "replay", lambda it: (replayed.append(None), replay(it))
        )
        training = Training(task, "cuda")
        # Nothing is near the budget but what moves whatever there is.
        with belady.virtualize(training.models, "8GiB", policy=policy, engine=engine) as vm:
            training.run(plain, ITERATIONS)
            said = vm.report()
        outcomes.append(training.outcome())
        assert (told.NOTE in said) is launches
        # Forward and backward, once it is measured, verified and rehearsed.
        assert (len(replayed) >= len(ITERATIONS) - 4) is launches
    expected, actual = outcomes
    assert differences(expected, actual) == []
    if engine == "graph":
        assert differences(Training(task, "cuda").run(plain, ITERATIONS).outcome(), actual) == []


@pytest.mark.gpu
def test_a_gpu_has_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    captured = noted(monkeypatch)
    training = Training(CNN, "cuda")
    with belady.virtualize(training.models, "8GiB", policy="vdnn_all", engine="graph"):
        training.run(plain, ITERATIONS)
        (launched,) = captured
        pool = launched.launches._pool
        left = training.loss(3)
        left.backward()
        training.optimizer.zero_grad()
        assert pool in pools()
        look(training)
        assert pool not in pools()


@pytest.mark.gpu
def test_a_gpu_has_its_memory_back_at_once_when_a_capture_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What comes next needs it, and garbage may be collected long after."""
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    monkeypatch.setattr(launching, "packs", lambda device: False)
    monkeypatch.setattr(capturing, "_MOST_S", math.inf)
    monkeypatch.setattr(capturing, "divisions", lambda *_: DIVISIONS)
    capture, captured = Launches.capture, Launching._captured
    tried: list[tuple[int, int]] = []
    left: list[set[tuple[int, int]]] = []

    def fail(self: Launches, issue: Any) -> Any:
        tried.append(self._pool)
        if len(tried) % 2:
            return capture(self, issue)
        return capture(self, lambda: (issue(), torch.empty(1 << 50, device="cuda")))

    def look_after(self: Launching, *given: Any) -> Launched | None:
        made = captured(self, *given)
        left.append(pools())
        return made

    monkeypatch.setattr(Launches, "capture", fail)
    monkeypatch.setattr(Launching, "_captured", look_after)
    training = Training(CNN, "cuda")
    gc.disable()
    try:
        with belady.virtualize(training.models, "8GiB", policy="vdnn_all", engine="graph"):
            training.run(plain, ITERATIONS)
    finally:
        gc.enable()
    # Forward and backward, each time in another way, and all once more in less.
    assert len(tried) == 2 * 2 * WAYS
    assert [it & {*tried} for it in left] == [set(), set()]


@pytest.mark.gpu
def test_a_gpu_divides_a_piece_by_what_an_iteration_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_GAINS", -100.0)
    monkeypatch.setattr(launching, "packs", lambda device: False)
    asked: list[Sequence[Event]] = []
    holes: list[Holes | None] = []
    capture = Launches.capture

    def noted(events: Sequence[Event], wall: int, count: int) -> list[Holes]:
        asked.append(events)
        return divisions(events, wall, count)

    def lacking(self: Launches, issue: Any) -> Any:
        holes.append(self.holes)
        if self.holes is None:
            raise torch.OutOfMemoryError
        return capture(self, issue)

    monkeypatch.setattr(capturing, "divisions", noted)
    monkeypatch.setattr(Launches, "capture", lacking)
    training = Training(CNN, "cuda")
    with belady.virtualize(training.models, "1GiB", policy="vdnn_all", engine="graph") as vm:
        training.run(plain, ITERATIONS)
        run = vm.run()
    assert run is not None
    assert any(told.NOTE in it for it in run.notes)
    # It could not grow, and then forward and backward were captured in one piece.
    assert holes == [None, (), ()]
    (events,) = asked
    taken = [block for block, nbytes in events if nbytes]
    assert taken
    assert sorted(taken) == sorted(block for block, nbytes in events if not nbytes)
    expected = Training(CNN, "cuda").run(plain, ITERATIONS).outcome()
    assert differences(expected, training.outcome()) == []


def pools() -> set[tuple[int, int]]:
    """Of torch's allocator, those with memory."""
    return {tuple(it["segment_pool_id"]) for it in torch.cuda.memory_snapshot()}
