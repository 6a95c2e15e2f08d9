from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.plan import Budget, Plan, Recompute
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Storage, StorageKind, Tier, Trace
from belady.measure import trial as trials
from belady.measure.kernels import Kernels
from belady.measure.margins import suited
from belady.measure.monitor import Sample
from belady.measure.stages import Policy
from belady.measure.trial import Trial
from belady.measure.verification import Verification
from belady.planners import plan, smallest_budget
from belady.simulate.blocks import Blocks
from tests.unit.planners.nets import ATEN, quick_layers
from tests.unit.simulate.cases import gpu, trace_of

STATE = Storage("cuda", 0, StorageKind.STATE, 0, 6, 6, Tier.DEVICE)
TRACE = trace_of([1.0] * 6, [(1000, 0, 5), (1000, 1, 4), (1000, 2, 3)])
HARDWARE = replace(gpu(), allocator=Allocator(1, 0.2, 0))
# What the leanest plan holds, without any margin.
PEAK = HARDWARE.allocator.peak_within(smallest_budget("auto", TRACE, HARDWARE, Budget(0)))

SAMPLE = Sample(0.0, 9.0)
MIB = 1 << 20


def first(policy: str, budget_bytes: int) -> tuple[Trial, list[str]]:
    asked = Verification(Policy(policy, Budget(budget_bytes)), HARDWARE)
    return asked.first(TRACE), asked.notes


def test_a_budget_with_room_for_the_stated_margin_is_planned_with_it() -> None:
    trial, notes = first("auto", int(1.25 * PEAK))
    assert trial.hardware == HARDWARE
    assert notes == []


def test_half_of_too_little_room_is_the_margin() -> None:
    trial, notes = first("auto", int(1.15 * PEAK))
    assert trial.policy == "hybrid_cheap"
    assert trial.hardware.allocator.margin_fraction == pytest.approx(0.075, abs=0.001)
    assert trial.plan.predicted_peak_bytes <= 1.15 / 1.07 * PEAK
    assert notes[0].startswith("the budget leaves a margin of 7%")


def test_with_too_little_room_no_convolution_is_computed_again() -> None:
    ops = list(quick_layers(8).ops)
    # Elsewhere there is room for replays.
    ops[len(ops) // 2] = replace(ops[len(ops) // 2], workspace_bytes=600 * MIB)
    trace = replace(quick_layers(8), ops=tuple(ops))
    needs = HARDWARE.allocator.peak_within(smallest_budget("auto", trace, HARDWARE, Budget(0)))
    asked = Verification(Policy("auto", Budget(int(1.15 * needs))), HARDWARE)
    trial = asked.first(trace)
    assert asked.notes[0].startswith("the budget leaves a margin of 7%")
    replays = (it for it in trial.plan.decisions.values() if isinstance(it, Recompute))
    assert {trace.ops[op].name for it in replays for op in it.ops} == {ATEN["norm"]}


@pytest.mark.parametrize("policy", ["auto", "hybrid", "hybrid_cheap", "lifetime"])
def test_no_margin_is_asked_for_what_is_there_all_the_time(policy: str) -> None:
    kept = 100 * PEAK
    state = replace(STATE, nbytes=kept)
    trace = replace(TRACE, storages=(*TRACE.storages, state))
    verification = Verification(Policy(policy, Budget(kept + int(1.25 * PEAK))), HARDWARE)
    trial = verification.first(trace)
    assert not verification.notes
    assert trial.hardware.allocator == replace(HARDWARE.allocator, settled_bytes=kept)
    assert kept < trial.plan.predicted_peak_bytes <= kept + PEAK * 1.25 / 1.2


@pytest.mark.parametrize("room", [1.02, 1.0])
def test_with_hardly_any_room_the_floor_goes_on(
    room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    needing(monkeypatch, 1.05)
    trial, notes = first("auto", int(room * PEAK))
    assert trial.plan.planner.startswith("floor")
    assert notes[0].startswith("the budget leaves a margin of 0%")


@pytest.mark.parametrize(
    ("lacks", "policy"), [(0.0, "hybrid_cheap"), (0.02, "hybrid_cheap"), (0.9, "floor")]
)
def test_the_floor_goes_on_where_blocks_of_other_plans_lack_much(
    lacks: float, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(_trace: object, plan: Plan, _allocator: object) -> float:
        return 0.0 if plan.planner.startswith("floor") else lacks

    monkeypatch.setattr("belady.measure.verification.excess", lacking)
    slow = with_links_of(2.0 * MIB)
    least = smallest_budget("floor", BIG, slow, Budget(1 << 40))
    trial = Verification(Policy("auto", Budget(int(0.95 * least))), slow).first(BIG)
    assert trial.policy == policy


def test_less_than_the_leanest_plan_needs_is_refused_with_what_is_needed() -> None:
    with pytest.raises(InfeasibleBudgetError) as refused:
        first("auto", int(0.9 * PEAK))
    assert refused.value.smallest_bytes == HARDWARE.allocator.budget_for(PEAK)


def test_what_an_engine_makes_of_a_plan_is_what_is_judged() -> None:
    trace = trace_of([1.0] * 16, [(MIB, at, 15 - at) for at in range(6)])
    fits = plan("lifetime", trace, QUICK, Budget(int(3.6 * MIB)))

    def fitted(_trace: object, _hardware: object, made: Plan) -> Plan:
        return replace(made, assignments=fits.assignments, predicted_seconds=99.0)

    policy = Policy("lifetime", Budget(int(3.6 * MIB)))
    trial = Verification(policy, QUICK, Kernels(fitted)).first(trace)
    assert trial.plan.assignments == fits.assignments
    assert trial.plan.predicted_seconds == 99.0


def test_other_policies_keep_to_the_stated_margin() -> None:
    with pytest.raises(InfeasibleBudgetError):
        first("floor", int(1.15 * PEAK))


def test_only_near_the_cap_is_memory_set_aside_in_one_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trials, "SPARE_BYTES", 0)
    near, far = first("auto", int(1.25 * PEAK))[0], first("auto", 10 * PEAK)[0]
    assert near.room(PEAK, 0) == pytest.approx(1.2 * PEAK, abs=1)
    assert far.room(PEAK, 0) == far.room(PEAK, PEAK) == 0


def test_what_blocks_take_is_set_aside_too_up_to_what_is_spared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spare, budget = PEAK // 100, int(1.25 * PEAK)
    monkeypatch.setattr(trials, "SPARE_BYTES", spare)
    near = first("auto", budget)[0]
    assert near.room(PEAK, int(1.22 * PEAK)) == int(1.22 * PEAK)
    assert near.room(PEAK, 2 * PEAK) == budget - spare


def test_who_planned_for_too_little_room_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def noted(name: str, *known: Any, **settings: Any) -> Plan:
        asked.append(name)
        return plan(name, *known, **settings)

    monkeypatch.setattr("belady.measure.verification.make_plan", noted)
    verification = Verification(Policy("auto", Budget(int(1.15 * PEAK))), HARDWARE)
    trial = verification.first(TRACE)
    peaks = (TierPeak(Tier.DEVICE, PEAK),)
    measured = Measured(1, 9.0, (9.0,), peaks, PEAK, allocation_retries=3)
    verification.better(TRACE, [verification.verified(trial, TRACE, measured, [SAMPLE])], [SAMPLE])
    assert asked[:3] == ["auto", "hybrid_cheap", "hybrid_cheap"]
    assert "auto" not in asked[3:]


BIG = trace_of([1.0] * 16, [(MIB, at, 15 - at) for at in range(6)])


def with_links_of(bytes_per_s: float) -> HardwareProfile:
    return replace(
        HARDWARE,
        capacities=tuple(replace(it, nbytes=1 << 40) for it in HARDWARE.capacities),
        links=tuple(
            replace(link, curve=((1, bytes_per_s),), duplex_bytes_per_s=bytes_per_s)
            for link in HARDWARE.links
        ),
    )


QUICK, SLOW = with_links_of(10.0 * MIB), with_links_of(0.02 * MIB)


@pytest.mark.parametrize(("budget", "margin"), [(6.0, 1.0), (3.6, 0.6), (2.5, None)])
def test_of_a_wider_margin_as_much_is_tried_as_there_is_room_for(
    budget: float, margin: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "belady")
    verification = Verification(Policy("lifetime", Budget(int(budget * MIB))), QUICK)
    trial = verification.first(BIG)
    peak = trial.plan.predicted_peak_bytes
    # Beside the largest piece it would have had room in twice the peak.
    peaks = (TierPeak(Tier.DEVICE, peak),)
    measured = Measured(1, 16.0, (16.0,), peaks, 2 * peak - MIB, allocation_retries=3)
    samples = [Sample(0.0, 16.0)]
    # The first step up was too little.
    less = replace(QUICK, allocator=replace(QUICK.allocator, margin_fraction=0.1))
    tried = [Trial(replace(trial.plan), less, "lifetime", measured)]
    tried.append(verification.verified(trial, BIG, measured, samples))
    _, better = verification.better(BIG, tried, samples)
    assert (better and round(better.hardware.allocator.margin_fraction, 2)) == margin
    said = [it.getMessage() for it in caplog.records]
    assert "measured 16.0 s an iteration; flushes of the allocator's cache: 3" in said
    widened = [it for it in verification.notes if it.startswith("under a margin of")]
    assert [it.rpartition("tried ")[2] for it in widened] == ([f"{margin:.0%}"] if margin else [])
    assert set(widened) <= set(said)


@pytest.mark.parametrize(("seconds", "tried"), [(1e9, True), (1.0, False)])
def test_no_plan_is_tried_that_is_foretold_to_be_slower_than_one_that_ran_without_flushes(
    seconds: float, tried: bool
) -> None:
    verification = Verification(Policy("lifetime", Budget(6 * MIB)), QUICK)
    trial = verification.first(BIG)
    peak = trial.plan.predicted_peak_bytes
    wide = replace(QUICK.allocator, margin_fraction=1.2)
    measured = Measured(1, seconds, (seconds,), (TierPeak(Tier.DEVICE, peak),), peak)
    calm = Trial(trial.plan, replace(QUICK, allocator=wide), "lifetime", measured)
    flushed = replace(measured, reserved_bytes=2 * peak - MIB, allocation_retries=3)
    samples = [Sample(0.0, 16.0)]
    last = verification.verified(trial, BIG, flushed, samples)
    _, better = verification.better(BIG, [calm, last], samples)
    assert (better is not None) is tried


def needing(monkeypatch: pytest.MonkeyPatch, most: float) -> None:
    """Blocks that need so many times the peak of their plan."""

    def made(plan: Plan, *, gradients_apart: bool) -> Blocks:
        # As with few gradients: among the rest they leave it in pieces.
        times = most if gradients_apart else 2 * most
        return Blocks(int(times * plan.predicted_peak_bytes), [])

    monkeypatch.setattr("belady.simulate.blocks.walked", lambda _, plan, *__: plan)
    monkeypatch.setattr("belady.simulate.blocks.blocks_of", made)
    # All that is more than the peak is lost between them.
    monkeypatch.setattr(Blocks, "held_bytes", lambda _: 0)


@pytest.mark.parametrize(("most", "margin"), [(1.25, 0.2), (1.45, 0.397), (2.1, 0.2)])
def test_a_margin_that_blocks_will_need_is_there_from_the_start(
    monkeypatch: pytest.MonkeyPatch, most: float, margin: float
) -> None:
    needing(monkeypatch, most)
    verification = Verification(Policy("lifetime", Budget(4 * MIB)), QUICK)
    trial = verification.first(BIG)
    assert round(trial.hardware.allocator.margin_fraction, 3) == margin


@pytest.mark.parametrize(
    ("bytes_per_s", "most", "begun"), [(1.0, 1.3, False), (0.02, 1.3, True), (0.02, 1.45, False)]
)
def test_it_is_not_where_its_plan_would_take_longer_than_flushes(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, most: float, begun: bool
) -> None:
    needing(monkeypatch, most)
    links = with_links_of(bytes_per_s * MIB)
    trial = Verification(Policy("lifetime", Budget(6 * MIB)), links).first(BIG)
    assert (trial.hardware.allocator.margin_fraction == links.allocator.margin_fraction) is begun


FINE = trace_of([1.0] * 130, [(MIB // 10, at, 129 - at) for at in range(60)])


def suited_to(trace: Trace, budget_bytes: int) -> float:
    """The margin that suits a plan for this trace."""
    make = partial(plan, "lifetime", trace, budget=Budget(budget_bytes))
    _, hardware = suited(trace, SLOW, lambda it: make(hardware=it))
    return round(hardware.allocator.margin_fraction, 3)


@pytest.mark.parametrize(("most", "margin"), [(1.0, 0.05), (1.11, 0.15), (1.17, 0.2)])
def test_a_smaller_margin_suits_where_blocks_fit_into_one_another(
    monkeypatch: pytest.MonkeyPatch, most: float, margin: float
) -> None:
    needing(monkeypatch, most)
    assert suited_to(FINE, int(3.6 * MIB)) == margin


@pytest.mark.parametrize(
    ("name", "share", "margin"),
    [
        ("aten.convolution.default", 0.01, 0.05),
        ("aten.convolution.default", 0.03, 0.2),
        ("aten.sort.default", 0.03, 0.05),
    ],
)
def test_the_stated_margin_suits_convolutions_with_large_workspaces(
    monkeypatch: pytest.MonkeyPatch, name: str, share: float, margin: float
) -> None:
    needing(monkeypatch, 1.0)
    budget = int(3.6 * MIB)
    first, *others = FINE.ops
    asks = replace(first, name=name, workspace_bytes=int(share * budget))
    assert suited_to(replace(FINE, ops=(asks, *others)), budget) == margin


def test_what_is_corrected_once_it_has_run_begins_with_the_stated_margin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needing(monkeypatch, 1.0)
    asked: list[float] = []

    def counted(
        name: str, trace: Trace, hardware: HardwareProfile, *rest: Any, **more: Any
    ) -> Plan:
        asked.append(hardware.allocator.margin_fraction)
        return plan(name, trace, hardware, *rest, **more)

    monkeypatch.setattr("belady.measure.verification.make_plan", counted)
    trial = Verification(Policy("lifetime", Budget(int(3.6 * MIB))), SLOW).first(FINE)
    assert trial.hardware.allocator.margin_fraction == SLOW.allocator.margin_fraction
    assert asked == [SLOW.allocator.margin_fraction]


@pytest.mark.parametrize(("most", "margin"), [(1.0, 0.1), (1.11, 0.15), (1.17, None)])
def test_a_smaller_margin_is_tried_later_only_where_blocks_fit_into_one_another(
    monkeypatch: pytest.MonkeyPatch, most: float, margin: float | None
) -> None:
    verification = Verification(Policy("lifetime", Budget(int(3.6 * MIB))), SLOW)
    needing(monkeypatch, 1.17)
    trial = verification.first(FINE)
    needing(monkeypatch, most)
    peak, seconds = trial.plan.predicted_peak_bytes, trial.plan.predicted_seconds
    measured = Measured(1, seconds, (seconds,), (TierPeak(Tier.DEVICE, peak),), int(1.2 * peak))
    samples = [Sample(0.0, seconds)]
    _, better = verification.better(
        FINE, [verification.verified(trial, FINE, measured, samples)], samples
    )
    assert (better and round(better.hardware.allocator.margin_fraction, 2)) == margin
