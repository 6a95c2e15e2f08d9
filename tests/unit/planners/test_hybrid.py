"""The hybrid policy: what it mixes, when, and how near to the best it comes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Encode, Offload, Plan, Recompute
from belady.ir.replay import sources
from belady.ir.trace import Tier, Trace
from belady.planners import plan, smallest_budget
from belady.planners.hybrid import HYBRID, _Search
from belady.planners.mix import Mixer
from belady.planners.wish import Wish
from belady.simulate import bound, simulate
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import random_trace
from tests.unit.planners.nets import VGG, cpu, gpu, net

PLENTY = Budget(1 << 40)
MB = 10**6


def chain(blocks: int, *, replayable: bool = True, device: str = "cuda") -> Trace:
    """Convolution, normalization and ReLU in place, over and over, as fast as on a large GPU."""
    conv = OpSpec(nbytes=100 * MB, device_us=500, parameter_bytes=MB)
    norm = OpSpec(nbytes=100 * MB, device_us=100, replayable=replayable)
    relu = OpSpec(
        nbytes=100 * MB,
        device_us=60,
        saves_input=False,
        saves_output=True,
        in_place=True,
        replayable=replayable,
    )
    return build_trace([conv, norm, relu] * blocks, device=device)


def masked(blocks: int) -> Trace:
    """Layers that save large masks, which no replay makes again."""
    layer = OpSpec(nbytes=50 * MB, device_us=500, parameter_bytes=MB)
    norm = OpSpec(nbytes=50 * MB, device_us=100, replayable=True)
    mask = OpSpec(nbytes=100 * MB, device_us=60, saves_input=False, saves_output=True, mask=True)
    return build_trace([layer, norm, mask] * blocks)


def budgets(trace: Trace, hardware: HardwareProfile, *shares: float) -> list[Budget]:
    """From what the leanest plan needs (0) to what keeping everything needs (1)."""
    low, high = (
        smallest_budget(policy, trace, hardware, PLENTY) for policy in ("hybrid", "baseline")
    )
    return [Budget(int(low + share * (high - low))) for share in shares]


def seconds(policy: str, trace: Trace, hardware: HardwareProfile, budget: Budget) -> float:
    try:
        return plan(policy, trace, hardware, budget).predicted_seconds
    except InfeasibleBudgetError:
        return float("inf")


def kinds(made: Plan) -> set[type]:
    return {type(decision) for decision in made.decisions.values()}


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_a_chain_of_cheap_ops_takes_little_more_than_it_must(share: float) -> None:
    trace, hardware = chain(30), gpu()
    (budget,) = budgets(trace, hardware, share)
    made = plan("hybrid", trace, hardware, budget)
    assert kinds(made) == {Offload, Recompute}
    assert check(trace, hardware, made, budget).ok
    best = bound(trace, hardware, budget)
    assert best.status == "optimal"
    assert "Recompute" in best.decisions
    assert best.gap(made.predicted_seconds) < 0.03
    # Copies alone are slower by far.
    copies = plan("lifetime", trace, hardware, budget).predicted_seconds
    keep = simulate(trace, hardware, Plan(trace.fingerprint, "keep", budget)).seconds
    assert made.predicted_seconds - keep < 0.6 * (copies - keep)


@pytest.mark.parametrize(
    ("trace", "hardware"),
    [
        (chain(8), gpu(link_rate=1e9)),
        (chain(8), gpu(link_rate=1e12)),
        (chain(8, device="cpu"), cpu()),
        (net(VGG), gpu(disk=True)),
        (random_trace(3, 80), gpu(link_rate=1e10)),
        (random_trace(4, 80, device="cpu"), cpu()),
    ],
    ids=["slow link", "fast link", "cpu", "vgg", "random", "random on a cpu"],
)
def test_never_slower_than_copies_alone(trace: Trace, hardware: HardwareProfile) -> None:
    asked = budgets(trace, hardware, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    found = [plan("hybrid", trace, hardware, budget) for budget in asked]
    for budget, made in zip(asked, found, strict=True):
        assert made.predicted_seconds <= seconds("lifetime", trace, hardware, budget)
        assert check(trace, hardware, made, budget).ok
    # The same once more, where all kinds of tries are made.
    assert plan("hybrid", trace, hardware, asked[1]) == found[1]


def test_nothing_is_tried_where_no_plan_can_be_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    # A host that is slower than the device leaves none to find, however long its kernels take.
    trace = build_trace([OpSpec(nbytes=MB, device_us=5, host_us=50, replayable=True)] * 8)
    monkeypatch.setattr(Mixer, "make", lambda *_: pytest.fail("a mix was tried"))
    keep = simulate(trace, gpu(), Plan(trace.fingerprint, "keep", PLENTY)).seconds
    assert plan("hybrid", trace, gpu(), PLENTY).predicted_seconds == keep


def test_without_replays_it_is_the_lifetime_policy() -> None:
    trace, hardware = chain(12, replayable=False), gpu()
    for budget in budgets(trace, hardware, 0.1, 0.5):
        made, copies = (plan(policy, trace, hardware, budget) for policy in ("hybrid", "lifetime"))
        assert made == replace(copies, planner=f"hybrid/{HYBRID.version}")


def issuing(hardware: HardwareProfile, seconds: float) -> HardwareProfile:
    """The machine whose host takes that long to issue a copy."""
    links = tuple(replace(link, issue_s=seconds) for link in hardware.links)
    return replace(hardware, links=links)


@pytest.mark.parametrize(("issue_us", "small_ones"), [(1, True), (200, False)])
def test_small_copies_are_left_out_where_issuing_one_takes_long(
    issue_us: int, small_ones: bool
) -> None:
    # A value of 2 MB and one of 8 in turn, of which the first saved are read last.
    small, large = (OpSpec(nbytes=size * MB, device_us=20, host_us=50) for size in (2, 8))
    trace = build_trace(
        [*[small, large] * 10, replace(small, replayable=True), *[large, small] * 10]
    )
    hardware = issuing(gpu(), issue_us * 1e-6)
    (budget,) = budgets(trace, hardware, 0.5)
    made = plan("hybrid", trace, hardware, budget)
    moved = [
        trace.storages[trace.values[value].storage].nbytes
        for value, decision in made.decisions.items()
        if isinstance(decision, Offload)
    ]
    assert max(moved) == 8 * MB
    assert (2 * MB in moved) == small_ones


def test_a_link_that_hides_every_copy_leaves_nothing_to_recompute() -> None:
    trace, hardware = chain(12), gpu(link_rate=1e13)
    (budget,) = budgets(trace, hardware, 0.5)
    made = plan("hybrid", trace, hardware, budget)
    assert kinds(made) == {Offload}
    assert simulate(trace, hardware, made).stall_seconds < 1e-3 * made.predicted_seconds


def test_a_link_that_hides_nothing_is_left_alone_as_long_as_replays_are_enough() -> None:
    trace, hardware = chain(12), gpu(link_rate=1e8)
    (budget,) = budgets(trace, hardware, 0.6)
    assert kinds(plan("hybrid", trace, hardware, budget)) == {Recompute}


def test_values_are_recomputed_where_no_tier_has_room() -> None:
    trace, hardware = chain(12), gpu()
    nowhere = replace(PLENTY, host_bytes=0, disk_bytes=0)
    smallest = smallest_budget("hybrid", trace, hardware, nowhere)
    assert smallest < 0.7 * smallest_budget("lifetime", trace, hardware, nowhere)
    budget = replace(nowhere, device_bytes=smallest)
    made = plan("hybrid", trace, hardware, budget)
    assert kinds(made) == {Recompute}
    assert check(trace, hardware, made, budget).ok


def test_a_host_with_little_room_is_filled_and_not_overfilled() -> None:
    trace, hardware = chain(12), gpu()
    (budget,) = budgets(trace, hardware, 0.8)
    budget = replace(budget, host_bytes=250 * MB)
    made = plan("hybrid", trace, hardware, budget)
    assert kinds(made) == {Offload, Recompute}
    assert 0 < check(trace, hardware, made, budget).host_bytes <= 250 * MB
    assert simulate(trace, hardware, made).peak(Tier.HOST) <= 250 * MB


def test_what_a_replay_starts_from_is_back_by_then() -> None:
    trace, hardware = chain(30), gpu()
    (budget,) = budgets(trace, hardware, 0.05)
    decisions = plan("hybrid", trace, hardware, budget).decisions
    moved = 0
    for replay in decisions.values():
        if isinstance(replay, Recompute):
            for source in sources(trace, replay):
                move = decisions.get(source)
                if isinstance(move, Offload):
                    moved += 1
                    assert move.copy_in_at <= move.ready_by <= replay.at
    assert moved > 5


def test_reasons_say_what_was_done() -> None:
    trace, hardware = chain(12), gpu()
    (budget,) = budgets(trace, hardware, 0.3)
    words = {Offload: "moved: ", Recompute: "recomputed: "}
    for it in plan("hybrid", trace, hardware, budget).assignments:
        assert it.reason.startswith(words.get(type(it.decision), "kept: "))


def test_a_thousand_saved_values_take_seconds() -> None:
    trace, hardware = chain(330), gpu()
    assert len(trace.saved) > 600
    (budget,) = budgets(trace, hardware, 0.4)
    start = time.process_time()
    made = plan("hybrid", trace, hardware, budget)
    assert time.process_time() - start < 20
    assert bound(trace, hardware, budget).gap(made.predicted_seconds) < 0.02


@pytest.mark.parametrize("over", [0.02, 0.2])
def test_of_two_mixes_the_one_whose_blocks_fit_is_taken(
    over: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, hardware = chain(12), gpu()
    (budget,) = budgets(trace, hardware, 0.4)
    fastest = plan("hybrid", trace, hardware, budget)
    refused: set[frozenset[int]] = set()

    def excess(_trace: Trace, made: Plan, _allocator: Allocator) -> float:
        # What recomputes as much as the fastest does is said to lie badly.
        if recomputed(made) >= recomputed(fastest):
            refused.add(frozenset(made.decisions))
            return over
        return -0.1

    def recomputed(made: Plan) -> int:
        return sum(isinstance(decision, Recompute) for decision in made.decisions.values())

    monkeypatch.setattr("belady.planners.hybrid.excess", excess)
    other = plan("hybrid", trace, hardware, budget)
    assert refused
    assert recomputed(other) < recomputed(fastest)
    assert other.predicted_seconds >= fastest.predicted_seconds
    assert check(trace, hardware, other, budget).ok


def test_single_values_are_exchanged_until_blocks_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hardware = chain(12), gpu()
    (budget,) = budgets(trace, hardware, 0.4)
    fastest = plan("hybrid", trace, hardware, budget)
    # The last ones saved are what the search begins with: of cheap replays all are alike.
    unwanted = max(v for v, it in fastest.decisions.items() if isinstance(it, Recompute))

    def excess(_trace: Trace, made: Plan, _allocator: Allocator) -> float:
        return 0.5 if isinstance(made.decisions.get(unwanted), Recompute) else -0.1

    monkeypatch.setattr("belady.planners.hybrid.excess", excess)
    made = plan("hybrid", trace, hardware, budget)
    assert not isinstance(made.decisions.get(unwanted), Recompute)
    assert made.predicted_seconds < 1.1 * fastest.predicted_seconds
    assert plan("hybrid", trace, hardware, budget) == made


def test_where_no_blocks_fit_the_fastest_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hardware = chain(12), gpu()
    (budget,) = budgets(trace, hardware, 0.4)
    fastest = plan("hybrid", trace, hardware, budget)
    monkeypatch.setattr("belady.planners.hybrid.excess", lambda *_: 0.03)
    made = plan("hybrid", trace, hardware, budget)
    assert made.predicted_seconds == pytest.approx(fastest.predicted_seconds, rel=0.01)


def test_a_mix_whose_blocks_hardly_lack_anything_is_not_given_up_for_a_slow_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, hardware = chain(12), gpu()
    (budget,) = budgets(trace, hardware, 0.4)
    fastest = plan("hybrid", trace, hardware, budget).predicted_seconds

    def excess(_trace: Trace, made: Plan, _allocator: Allocator) -> float:
        return -0.1 if made.predicted_seconds > 1.2 * fastest else 0.01

    monkeypatch.setattr("belady.planners.hybrid.excess", excess)
    assert plan("hybrid", trace, hardware, budget).predicted_seconds < 1.05 * fastest


def test_mixes_whose_blocks_do_not_fit_lead_to_those_that_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, hardware = chain(40), gpu()
    (budget,) = budgets(trace, hardware, 0.5)
    fastest = plan("hybrid", trace, hardware, budget)

    def recomputed(made: Plan) -> int:
        return sum(isinstance(decision, Recompute) for decision in made.decisions.values())

    def excess(_trace: Trace, made: Plan, _allocator: Allocator) -> float:
        # Copies alone fit and are slow; of mixes few do, and those beside them do not.
        return -0.1 if recomputed(made) in (0, recomputed(fastest) - 1) else 0.2

    monkeypatch.setattr("belady.planners.hybrid.excess", excess)
    made = plan("hybrid", trace, hardware, budget)
    assert made.predicted_seconds < 1.05 * fastest.predicted_seconds


def test_the_two_best_of_the_first_mixes_lead_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[list[float]] = []
    descended, bettered = _Search._descended, _Search._bettered

    def begun(search: _Search) -> Wish:
        ways.append([])
        return descended(search)

    def noted(search: _Search, at: Wish) -> Wish:
        ways[-1].append(search._prices[at])
        return bettered(search, at)

    monkeypatch.setattr(_Search, "_descended", begun)
    monkeypatch.setattr(_Search, "_bettered", noted)
    trace, hardware = chain(8), gpu()
    (budget,) = budgets(trace, hardware, 0.25)
    plan("hybrid", trace, hardware, budget)
    assert ways
    assert all(len(prices) == 2 and prices == sorted(prices) for prices in ways)


def test_masks_are_held_in_bits_where_copies_would_be_waited_for() -> None:
    trace, hardware = masked(20), gpu()
    for budget in budgets(trace, hardware, 0.2, 0.5):
        made = plan("hybrid", trace, hardware, budget)
        encoded = [it for it in made.assignments if isinstance(it.decision, Encode)]
        assert len(encoded) >= 5
        assert all(it.reason.startswith("encoded: ") for it in encoded)
        least = bound(trace, hardware, budget).seconds
        assert least <= made.predicted_seconds <= 1.1 * least


def test_with_encodings_plans_are_faster_and_no_budget_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace, hardware = masked(20), gpu()
    asked = budgets(trace, hardware, 0.0, 0.2, 0.5)
    found = [seconds("hybrid", trace, hardware, budget) for budget in asked]
    monkeypatch.setattr("belady.planners.ways.encodings", lambda *_: {})
    without = [seconds("hybrid", trace, hardware, budget) for budget in asked]
    assert smallest_budget("hybrid", trace, hardware, PLENTY) >= asked[0].device_bytes
    assert all(one <= other for one, other in zip(found, without, strict=True))
    assert found[1] < 0.95 * without[1]
