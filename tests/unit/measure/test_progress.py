"""What is known of a plan that asks for less workspace, once its convolutions have run so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Budget, Plan, Workspace
from belady.ir.timeline import TierPeak
from belady.ir.trace import Phase, Tier, Trace
from belady.measure.monitor import Sample
from belady.measure.progress import Progress
from belady.measure.stages import Policy, Stage
from belady.measure.trial import Trial
from belady.measure.verification import Verification
from belady.memory.carrier import Carrier
from belady.memory.lanes import lanes_for
from belady.memory.piece import Piece
from belady.memory.tape import Tape
from belady.planners import plan, smallest_budget
from belady.planners.workspace import LEAN
from belady.simulate import simulate
from tests.unit.planners.nets import MIB, VGG, gpu, net


def tried_in_backward(trace: Trace) -> Trace:
    """Convolutions take too little in forward to be tried."""
    ops = list(trace.ops)
    for index, op in enumerate(ops):
        if op.algorithms and op.phase is Phase.BACKWARD:
            ops[index] = replace(op, name="aten.convolution_backward.default")
        elif op.algorithms:
            ops[index] = replace(op, workspace_bytes=0, algorithms=())
    return replace(trace, ops=tuple(ops))


TRACE = tried_in_backward(net(VGG, workspace_bytes=3 * MIB))
CONVOLUTIONS = [index for index, op in enumerate(TRACE.ops) if "convolution" in op.name]
HARDWARE = gpu()
PLENTY = Budget(1 << 40)
# The trials found what takes nothing, which just fits; what then runs takes 2 MiB.
BUDGET = Budget(smallest_budget("vdnn_all", TRACE, HARDWARE, PLENTY) + 5 * MIB // 2)
SAMPLE = Sample(0.0, 1.0)


def lean_kind() -> Progress:
    return Progress(Stage.SETTLING, Trial(planned(), HARDWARE, "vdnn_all"))


PLAN = plan("baseline", TRACE, HARDWARE, PLENTY)


class Shown(Verification):
    """Notes what it is shown."""

    def __init__(self) -> None:
        super().__init__(Policy("baseline", PLENTY), HARDWARE)

    def chosen(
        self, trace: Trace, tried: Sequence[Trial], samples: Sequence[Sample], *numerics: str
    ) -> tuple[Trace, Trial]:
        self.samples = samples
        return trace, tried[-1]


def planned() -> Plan:
    made = plan("vdnn_all", TRACE, HARDWARE, BUDGET)
    assert made.workspace is Workspace.MEMORY
    return made


@pytest.mark.parametrize("flushing", [0, 1, 3])
def test_kernels_that_nobody_watched_show_their_pace_before_a_plan_is_verified(
    flushing: int,
) -> None:
    verified, verification = Sample(0.0, 1.0), Shown()
    held = [Sample(0.0, 3.0, retries=1, held=True)] * flushing
    held += [Sample(0.0, 2.0, held=True)] * (flushing < 3)
    kind = Progress(Stage.SETTLING, Trial(PLAN, HARDWARE, "baseline"), unwatched=True)
    kind.went_as_planned(SAMPLE)
    assert kind.stage is Stage.PACED
    assert kind.level(recording=False) == 1
    for sample in held:
        assert kind.stage is Stage.PACED
        assert not kind.went_as_planned(sample)
    assert kind.stage is Stage.VERIFYING
    assert [kind.went_as_planned(verified) for _ in range(2)] == [False, True]
    kind.conclude(verification, TRACE, ())
    # One in which the allocator flushed its cache shows nothing of kernels; they are shown by
    # the next, unless it always does.
    shown = [sample for sample in held if not sample.retries]
    assert verification.samples == [*shown, verified, verified]
    assert kind.measured is not None
    assert kind.measured.iterations == (1.0, 1.0)


def seen() -> Trace:
    """The iteration as it runs: convolutions take more than was found, and longer."""
    ops = [
        replace(op, device_seconds=2 * op.device_seconds, workspace_bytes=2 * MIB)
        for op in TRACE.ops
    ]
    return replace(TRACE, ops=tuple(ops))


def test_a_plan_that_asks_for_less_settles_twice_and_then_shows_what_it_takes() -> None:
    kind = lean_kind()
    assert not kind.shows_beside
    kind.went_as_planned(SAMPLE)
    assert kind.stage is Stage.SETTLING
    assert kind.shows_beside
    kind.went_otherwise()
    assert kind.shows_beside
    kind.went_as_planned(SAMPLE)
    assert kind.stage is Stage.VERIFYING
    assert not kind.shows_beside
    assert kind.samples == []


def test_every_plan_settles_anew() -> None:
    kind, carrier = lean_kind(), SimpleNamespace(device=torch.device("cpu"))
    assert kind.trial is not None
    everything = replace(kind.trial, plan=replace(kind.trial.plan, assignments=(), budget=PLENTY))
    kind.went_as_planned(SAMPLE)
    kind.begin(everything, TRACE, cast(Carrier, carrier))
    assert kind.stage is Stage.SETTLING
    assert not kind.shows_beside


@pytest.mark.parametrize(("leaner", "settles"), [(True, 2), (False, 1)])
def test_memory_is_in_one_piece_again_when_a_plan_has_settled(
    leaner: bool, settles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = planned() if leaner else plan("floor", TRACE, HARDWARE, PLENTY)
    cleared: list[Stage] = []
    kind = Progress(Stage.SETTLING, Trial(made, HARDWARE, "vdnn_all"))
    monkeypatch.setattr(Piece, "clear", lambda _: cleared.append(kind.stage))
    for _ in range(settles):
        assert cleared == []
        kind.went_as_planned(SAMPLE)
    kind.went_as_planned(SAMPLE)
    # Before the first iteration that is verified, and never in one.
    assert cleared == [Stage.SETTLING]
    assert kind.samples == [SAMPLE]


def test_a_flush_for_what_was_left_before_verifies_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cleared: list[None] = []
    kind = Progress(Stage.SETTLING, Trial(plan("floor", TRACE, HARDWARE, PLENTY), HARDWARE, "auto"))
    kind.went_as_planned(SAMPLE)
    monkeypatch.setattr(Piece, "clear", lambda _: cleared.append(None))
    flushing = Sample(0.0, 9.0, retries=1)
    assert not kind.went_as_planned(SAMPLE)
    assert not kind.went_as_planned(flushing)
    assert cleared == [None]
    # In a row: memory was in one piece again only because of the flush.
    assert not kind.went_as_planned(SAMPLE)
    assert kind.went_as_planned(SAMPLE)
    assert kind.samples == [SAMPLE, SAMPLE]


def test_a_plan_that_flushes_every_other_time_is_known_as_such() -> None:
    kind = Progress(Stage.SETTLING, Trial(plan("floor", TRACE, HARDWARE, PLENTY), HARDWARE, "auto"))
    kind.went_as_planned(SAMPLE)
    flushing = Sample(0.0, 9.0, retries=1)
    iterations = [SAMPLE, flushing, SAMPLE, flushing, SAMPLE, flushing]
    ended = [kind.went_as_planned(it) for it in iterations]
    assert ended == [False, False, False, False, False, True]
    assert flushing in kind.samples


def test_a_plan_that_flushes_each_time_is_known_as_such() -> None:
    kind = Progress(Stage.SETTLING, Trial(plan("floor", TRACE, HARDWARE, PLENTY), HARDWARE, "auto"))
    kind.went_as_planned(SAMPLE)
    flushing = Sample(0.0, 9.0, retries=1)
    ended = [kind.went_as_planned(flushing) for _ in range(4)]
    assert ended == [False, False, False, True]
    assert kind.samples == [flushing, flushing]
    # The next plan may flush for what this one has left.
    carrier = cast(
        Carrier, SimpleNamespace(device=torch.device("cpu"), reserve=lambda _: None, paging=None)
    )
    everything = replace(planned(), assignments=(), budget=PLENTY)
    kind.begin(Trial(everything, HARDWARE, "auto"), TRACE, carrier)
    assert kind.flushed == 0


def test_memory_far_below_its_budget_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms: list[int] = []
    monkeypatch.setattr("belady.measure.trial.SPARE_BYTES", 0)
    monkeypatch.setattr(
        "belady.memory.piece.make_room", lambda _, room, *_holes: rooms.append(room)
    )
    carrier = cast(Carrier, SimpleNamespace(device=torch.device("cpu"), reserve=lambda _: None))
    for budget, cleared in ((PLENTY, 1), (Budget(2 * MIB), 2)):
        made = replace(plan("floor", TRACE, HARDWARE, PLENTY), assignments=(), budget=budget)
        kind = Progress(Stage.SETTLING)
        rooms.clear()
        kind.begin(Trial(made, HARDWARE, "floor"), TRACE, carrier)
        kind.went_as_planned(SAMPLE)
        assert len(rooms) == cleared
        assert len({*rooms}) == 1


def test_another_plan_settles_once() -> None:
    made = plan("floor", TRACE, HARDWARE, PLENTY)
    kind = Progress(Stage.SETTLING, Trial(made, HARDWARE, "floor"))
    kind.went_as_planned(SAMPLE)
    assert kind.stage is Stage.VERIFYING
    assert not kind.shows_beside


@pytest.mark.parametrize("other", [None, net(VGG + " conv fc")])
def test_what_does_not_match_teaches_nothing(other: Trace | None) -> None:
    kind = lean_kind()
    before = kind.trial
    assert kind.learn(TRACE, other) is TRACE
    assert kind.trial is before


def test_what_was_seen_is_predicted_and_planned_with() -> None:
    kind = lean_kind()
    trace = kind.learn(TRACE, seen())
    assert len(planned().layer_algorithms) == len(CONVOLUTIONS) / 2
    run = kind.run(trace, (), ())
    assert run is not None
    assert run.plan.layer_algorithms == tuple((index, LEAN) for index in CONVOLUTIONS)
    kernels = sum(op.device_seconds for op in TRACE.ops)
    longer = sum(TRACE.ops[index].device_seconds for index in CONVOLUTIONS)
    assert run.predicted.compute_seconds == pytest.approx(kernels + longer)
    before = simulate(TRACE, HARDWARE, planned())
    assert run.predicted.peak(Tier.DEVICE) == before.peak(Tier.DEVICE) + 2 * MIB
    again = plan("vdnn_all", trace, HARDWARE, BUDGET)
    assert again.predicted_peak_bytes == run.predicted.peak(Tier.DEVICE)


def test_an_iteration_that_goes_as_it_was_seen_to_run_is_no_surprise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Allocator] = []

    def noted(name: str, trace: Trace, hardware: HardwareProfile, *rest: Any, **how: Any) -> Plan:
        asked.append(hardware.allocator)
        return plan(name, trace, hardware, *rest, **how)

    monkeypatch.setattr("belady.measure.verification.make_plan", noted)
    kind, verification = lean_kind(), Verification(Policy("vdnn_all", BUDGET), HARDWARE)
    trace = kind.learn(TRACE, seen())
    run = kind.run(trace, (), ())
    assert run is not None
    assert run.predicted.peak(Tier.DEVICE) > run.plan.predicted_peak_bytes
    peaks = (TierPeak(Tier.DEVICE, run.predicted.peak(Tier.DEVICE)),)
    host_s = sum(op.host_seconds for op in TRACE.ops)
    kind.samples = [Sample(0.0, run.predicted.seconds, peaks, host_seconds=host_s)] * 2
    assert kind.conclude(verification, trace, ()) == (trace, None)
    # The policy was asked with what is known now, and without a larger margin.
    assert asked == [HARDWARE.allocator]
    assert verification.notes == []


def test_what_memory_was_divided_into_is_kept_with_a_plan_that_was_measured() -> None:
    made = Trial(plan("floor", TRACE, HARDWARE, PLENTY), HARDWARE, "auto")
    kind = Progress(Stage.SETTLING, made)
    kind.piece.holes = (3 * MIB,)
    for _ in range(3):
        ended = kind.went_as_planned(SAMPLE)
    assert ended
    verification = Verification(Policy("auto", PLENTY), HARDWARE)
    kind.conclude(verification, TRACE, ())
    assert kind.trial is not None
    assert kind.trial.holes == (3 * MIB,)
    carrier = cast(Carrier, SimpleNamespace(device=torch.device("cpu"), reserve=lambda _: None))
    again = Progress(Stage.SETTLING)
    nothing = replace(kind.trial.plan, assignments=())
    again.begin(replace(kind.trial, plan=nothing), TRACE, carrier)
    assert again.piece.holes == (3 * MIB,)


class Launched(Progress):
    """A kind whose steady iterations are not issued."""

    @property
    def issued(self) -> bool:
        return False


FLUSHING = Sample(0.0, 9.0, retries=1)


def steady(cls: type[Progress] = Progress, *, unwatched: bool = False) -> Progress:
    """A kind whose plan was verified, in iterations of a second."""
    kind = cls(Stage.SETTLING, Trial(PLAN, HARDWARE, "baseline"), unwatched=unwatched)
    while not kind.went_as_planned(SAMPLE):
        pass
    kind.conclude(Shown(), TRACE, ())
    assert kind.stage is Stage.STEADY
    return kind


@pytest.mark.parametrize("unwatched", [False, True])
def test_steady_iterations_that_lose_time_to_the_allocator_are_verified_again(
    unwatched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, cleared = steady(unwatched=unwatched), list[None]()
    monkeypatch.setattr(Piece, "clear", lambda _: cleared.append(None))
    kind.went_as_planned(SAMPLE)
    assert (kind.stage, cleared) == (Stage.STEADY, [])
    # One can be of what ran in between: memory is set aside anew.
    kind.went_as_planned(FLUSHING)
    assert (kind.stage, cleared) == (Stage.STEADY, [None])
    kind.went_as_planned(FLUSHING)
    # Kernels that nobody watched show their pace once more.
    assert kind.stage is (Stage.PACED if unwatched else Stage.VERIFYING)
    ended = [kind.went_as_planned(FLUSHING) for _ in range(3 + 3 * unwatched)]
    assert ended == [*[False] * (2 + 3 * unwatched), True]
    kind.conclude(Shown(), TRACE, ())
    assert kind.stage is Stage.STEADY
    assert kind.measured is not None
    assert kind.measured.allocation_retries == 2
    # What was measured of the same plan before holds no longer.
    assert kind.tried == [kind.trial]


def test_flushes_that_were_known_when_a_plan_was_chosen_are_no_news() -> None:
    kind, concluded = steady(), 0
    for _ in range(40):
        if kind.went_as_planned(FLUSHING):
            kind.conclude(Shown(), TRACE, ())
            concluded += 1
    assert concluded == 1
    assert kind.stage is Stage.STEADY


def test_what_loses_time_again_and_again_is_left_alone_in_the_end() -> None:
    kind, concluded = steady(), 0
    for index in range(80):
        flushes = kind.stage is Stage.STEADY and index % 8 > 1
        if kind.went_as_planned(FLUSHING if flushes else SAMPLE):
            kind.conclude(Shown(), TRACE, ())
            concluded += 1
    assert concluded == 3
    assert kind.stage is Stage.STEADY


@pytest.mark.parametrize(("every", "again"), [(9, 0), (8, 1), (2, 1)])
def test_flushes_now_and_then_cost_no_verification(
    every: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, cleared = steady(), list[None]()
    monkeypatch.setattr(Piece, "clear", lambda _: cleared.append(None))
    for index in range(4 * every):
        if kind.stage is Stage.STEADY:
            kind.went_as_planned(SAMPLE if index % every else FLUSHING)
    assert kind.unrest.again == again
    # Memory is in one piece again after each of them.
    assert len(cleared) == (2 if again else 4)


def test_what_is_put_in_force_does_not_answer_for_what_was_before() -> None:
    kind = steady()
    kind.went_as_planned(FLUSHING)
    carrier = cast(Carrier, SimpleNamespace(device=torch.device("cpu"), reserve=lambda _: None))
    assert kind.trial is not None
    kind.begin(replace(kind.trial, plan=replace(PLAN, assignments=())), TRACE, carrier)
    kind.went_as_planned(SAMPLE)
    assert kind.stage is Stage.STEADY
    kind.went_as_planned(FLUSHING)
    assert kind.stage is Stage.STEADY


def test_memory_is_divided_anew_for_what_is_verified_again() -> None:
    kind = steady()
    kind.piece._suits = (3 * MIB,)
    kind.went_as_planned(FLUSHING)
    kind.went_as_planned(FLUSHING)
    assert kind.piece.holes == ()


def test_events_that_were_taken_down_are_so_again_when_they_hold_no_longer() -> None:
    kind = steady()
    assert kind.trial is not None
    moving = replace(kind.trial, plan=plan("floor", TRACE, HARDWARE, PLENTY))
    assert moving.measured is not None
    kind.trial = replace(moving, measured=replace(moving.measured, recorded=7))
    assert kind.level(recording=False) == 0
    for _ in range(2):
        kind.went_as_planned(FLUSHING)
    while not kind.went_as_planned(SAMPLE):
        pass
    kind.conclude(Shown(), TRACE, ())
    assert kind.level(recording=False) == 2
    kind.recorded(replace(SAMPLE, tape=Tape(lanes_for("cpu"))))
    assert kind.level(recording=False) == 0


def test_what_is_launched_is_not_verified_as_issued() -> None:
    kind = steady(Launched)
    for _ in range(4):
        kind.went_as_planned(FLUSHING)
    assert kind.stage is Stage.STEADY


def test_a_plan_that_comes_back_settles_and_keeps_what_was_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known, cleared = steady().trial, list[None]()
    assert known is not None
    carrier = cast(Carrier, SimpleNamespace(device=torch.device("cpu"), reserve=lambda _: None))
    kind = Progress(Stage.STEADY, unwatched=True)
    kind.begin(replace(known, plan=replace(PLAN, assignments=())), TRACE, carrier)
    monkeypatch.setattr(Piece, "clear", lambda _: cleared.append(None))
    assert kind.stage is Stage.SETTLING
    kind.went_as_planned(FLUSHING)
    assert (kind.stage, cleared) == (Stage.STEADY, [None])
    assert kind.measured is known.measured
