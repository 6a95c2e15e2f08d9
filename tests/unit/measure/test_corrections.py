from dataclasses import replace

import pytest

from belady.ir.hardware import Allocator, HardwareProfile, Link
from belady.ir.plan import Budget, Offload, Plan, Recompute
from belady.ir.timeline import Measured, TierPeak
from belady.ir.trace import Tier
from belady.measure.corrections import (
    with_device_of,
    with_gap_of,
    with_host_of,
    with_issue_of,
    with_links_of,
    with_peak_of,
)
from belady.measure.monitor import Sample
from belady.simulate import simulate
from tests.unit.simulate.cases import gpu, machine, plan_of, trace_of

TRACE = trace_of([1.0, 1.0, 1.0, 1.0], [(1, 0, 3)], host_s=1.0)
PLAN = plan_of(TRACE, Offload(Tier.HOST, 1, 2, 3, 3))
TRACE_FAST = trace_of([1.0, 1.0, 1.0, 1.0], [(1, 0, 3)])
EVERYTHING_KEPT = plan_of(TRACE_FAST)
LOSING = replace(PLAN, predicted_seconds=6.0)
ALLOCATOR = Allocator(1, 0.2, 0)


def measured(*, reserved: int, retries: int = 0) -> Measured:
    peaks = (TierPeak(Tier.DEVICE, 100),)
    return Measured(1, 5.0, (5.0,), peaks, reserved, allocation_retries=retries)


def sample(seconds: float) -> Sample:
    return Sample(1, 0.0, host_seconds=seconds)


def test_the_host_is_as_fast_as_the_fastest_unwatched_iteration():
    corrected = with_host_of(TRACE, [sample(3.0), sample(2.0)])
    assert corrected is not None
    assert [op.host_seconds for op in corrected.ops] == [0.5] * 4


OUT = Link(Tier.DEVICE, Tier.HOST, ((1, 1.0),), 1.0, 0.0, "pcie", issue_s=1.0)
BACK = Link(Tier.HOST, Tier.DEVICE, ((1, 1.0),), 1.0, 0.0, "pcie", issue_s=2.0)
DISK = Link(Tier.HOST, Tier.DISK, ((1, 1.0),), 1.0, 0.0, "disk")


def issuing(seconds: float) -> Sample:
    return Sample(1, 0.0, engine_seconds=seconds)


def issue_of(probed: HardwareProfile, plan: Plan, samples: list[Sample]) -> HardwareProfile | None:
    """What the first plan shows."""
    return with_issue_of(probed, plan, samples, probed)


def test_issuing_takes_what_it_took_under_the_plan():
    found = issue_of(machine(OUT, BACK, DISK), PLAN, [issuing(9.0), issuing(6.0)])
    assert found is not None
    assert [link.issue_s for link in found.links] == [3.0, 3.0, 0.0]


def test_what_disturbed_the_host_under_one_plan_is_forgotten_under_the_next():
    probed = machine(OUT, BACK, DISK)
    disturbed = with_issue_of(probed, PLAN, [issuing(20.0)], probed)
    assert disturbed is not None
    calm = with_issue_of(disturbed, PLAN, [issuing(6.0)], probed)
    assert calm is not None
    assert [link.issue_s for link in calm.links] == [3.0, 3.0, 0.0]
    # Disturbed once more, what is known stays; and never is it less than the probe found.
    assert with_issue_of(calm, PLAN, [issuing(20.0)], probed) is None
    least = with_issue_of(calm, PLAN, [issuing(0.0)], probed)
    assert least is not None
    assert [link.issue_s for link in least.links] == [1.0, 2.0, 0.0]


INSIDE = Link(Tier.DEVICE, Tier.DEVICE, ((1, 1.0),), 1.0, 0.0, "memory", issue_s=1.0)


def test_what_replays_take_is_not_taken_for_the_copies():
    plan = plan_of(TRACE, Recompute((1,), 3))
    found = issue_of(machine(OUT, BACK, INSIDE), plan, [replace(issuing(4.0), replay_seconds=4.0)])
    assert found is not None
    assert [link.issue_s for link in found.links] == [1.0, 2.0, 4.0]
    # And the other way round.
    found = issue_of(machine(OUT, BACK, INSIDE), PLAN, [issuing(6.0)])
    assert found is not None
    assert [link.issue_s for link in found.links] == [3.0, 3.0, 1.0]


def hooked(*seconds: float) -> list[Sample]:
    return [Sample(1, 0.0, hook_seconds=it) for it in seconds]


TWO = trace_of([1.0, 1.0, 1.0, 1.0], [(1, 0, 3), (1, 0, 3)], host_s=1.0)
COPY = Offload(Tier.HOST, 1, 2, 3, 3)


def test_what_hooks_take_is_shared_by_all_that_is_not_kept():
    probed = machine()
    one, two = plan_of(TWO, COPY), plan_of(TWO, COPY, COPY)
    found = issue_of(probed, two, hooked(9.0, 6.0))
    assert found == replace(probed, hook_s=3.0)
    # Of a plan whose hooks are never off nothing is seen, and none are on where all is kept.
    assert with_issue_of(found, one, hooked(0.0), probed) is None
    assert with_issue_of(found, plan_of(TWO), hooked(1.0), probed) is None
    # As with copies: what disturbs the host makes it slower only.
    assert with_issue_of(found, one, hooked(9.0), probed) is None
    assert with_issue_of(found, one, hooked(2.5), probed) is None
    assert with_issue_of(found, one, hooked(1.0), probed) == replace(probed, hook_s=1.0)


@pytest.mark.parametrize(("plan", "seconds"), [(PLAN, 2.0), (PLAN, 0.0), (plan_of(TRACE), 6.0)])
def test_what_the_probe_found_stays_where_a_plan_says_no_more(plan: Plan, seconds: float):
    assert issue_of(machine(OUT, BACK), plan, [issuing(seconds)]) is None


@pytest.mark.parametrize("seconds", [3.9, 5.0, 0.0])
def test_host_seconds_that_agree_or_mean_nothing_change_nothing(seconds: float):
    assert with_host_of(TRACE, [sample(seconds)]) is None


def test_on_a_cpu_the_hosts_share_was_measured_apart():
    assert with_host_of(replace(TRACE, device="cpu"), [sample(1.0)]) is None


def test_a_flushed_cache_widens_the_margin():
    found = with_gap_of(TRACE, PLAN, ALLOCATOR, measured(reserved=101, retries=1))
    assert found is not None
    assert found.margin_fraction == pytest.approx(0.32)


def test_what_was_held_is_to_have_room_beside_the_largest_piece():
    ops = (replace(TRACE.ops[0], workspace_bytes=40), *TRACE.ops[1:])
    large = replace(TRACE, ops=ops)
    flushed = measured(reserved=101, retries=1)
    found = with_gap_of(large, PLAN, ALLOCATOR, flushed, [(0.1, True), (0.15, False)])
    assert found is not None
    assert found.margin_fraction == pytest.approx(0.41)
    # That is much for a first step, after which there is none back.
    found = with_gap_of(large, PLAN, ALLOCATOR, flushed, [(0.15, False)])
    assert found is not None
    assert found.margin_fraction == pytest.approx(0.32)


def test_a_plan_that_loses_time_is_tried_with_the_margin_that_its_blocks_need():
    found = with_gap_of(TRACE, LOSING, ALLOCATOR, measured(reserved=104))
    assert found is not None
    assert found.margin_fraction == pytest.approx(0.07)


def test_a_plan_that_loses_nothing_keeps_its_margin():
    assert with_gap_of(TRACE, PLAN, ALLOCATOR, measured(reserved=104)) is None


def test_nothing_is_lost_where_the_host_takes_as_long_anyway():
    slow = trace_of([1.0, 1.0, 1.0, 1.0], [(1, 0, 3)], host_s=1.5)
    assert with_gap_of(slow, LOSING, ALLOCATOR, measured(reserved=104)) is None


def margin_after(
    fraction: float, others: list[tuple[float, bool]], *, flushed: bool
) -> float | None:
    allocator = replace(ALLOCATOR, margin_fraction=fraction)
    # All of it was set aside, which says nothing of what is needed.
    seen = measured(reserved=int(100 * (1 + fraction)), retries=int(flushed))
    found = with_gap_of(TRACE, LOSING, allocator, seen, others)
    return None if found is None else found.margin_fraction


def test_half_of_a_margin_that_was_set_aside_is_worth_trying():
    assert margin_after(0.18, [], flushed=False) == pytest.approx(0.09)
    assert margin_after(0.09, [(0.18, False)], flushed=False) is None
    # Where that is too little, what lies between it and what was enough.
    assert margin_after(0.09, [(0.18, False)], flushed=True) == pytest.approx(0.135)
    assert margin_after(0.135, [(0.18, False), (0.09, True)], flushed=False) is None
    assert margin_after(0.135, [(0.18, False), (0.09, True)], flushed=True) is None
    assert margin_after(0.4, [(0.18, True)], flushed=False) == pytest.approx(0.29)


@pytest.mark.parametrize(("peak", "margin"), [(100, None), (107, None), (111, 11)])
def test_a_peak_that_eats_half_of_the_margin_widens_it(peak: int, margin: int | None):
    plan = replace(PLAN, budget=Budget(120), predicted_peak_bytes=100)
    found = with_peak_of(plan, ALLOCATOR, replace(measured(reserved=120), peaks=(at(peak),)))
    assert (found.margin_bytes if found else None) == margin


def at(peak: int) -> TierPeak:
    return TierPeak(Tier.DEVICE, peak)


def timed(seconds: float) -> Sample:
    return Sample(0.0, seconds)


def test_kernels_take_no_longer_than_the_iteration_that_they_are_in():
    corrected = with_device_of(TRACE_FAST, EVERYTHING_KEPT, gpu(), [timed(4.0), timed(3.2)])
    assert corrected is not None
    assert [op.device_seconds for op in corrected.ops] == pytest.approx([0.8] * 4)


def test_kernels_of_other_algorithms_take_their_share() -> None:
    # Of five times as long each.
    slow = replace(EVERYTHING_KEPT, layer_algorithms=tuple((op, "slow") for op in range(4)))
    corrected = with_device_of(TRACE_FAST, slow, gpu(), [timed(16.0)])
    assert corrected is not None
    assert simulate(corrected, gpu(), slow).seconds == pytest.approx(16.0)


@pytest.mark.parametrize("seconds", [5.0, 4.0, 3.99, 0.5])
def test_an_iteration_that_agrees_or_that_no_clock_explains_changes_nothing(seconds: float):
    assert with_device_of(TRACE_FAST, EVERYTHING_KEPT, gpu(), [timed(seconds)]) is None


def test_links_that_were_measured_while_others_used_them_are_faster() -> None:
    slow = replace(gpu(), links=tuple(_slower(link, 8) for link in gpu().links))
    plan = plan_of(TRACE_FAST, Offload(Tier.HOST, 0, 1, 3, 3))
    waits, truth = simulate(TRACE_FAST, slow, plan), simulate(TRACE_FAST, gpu(), plan)
    assert waits.stall_seconds > 0.2 * waits.seconds
    found = with_links_of(TRACE_FAST, plan, slow, [timed(truth.seconds), timed(99.0)])
    assert found is not None
    assert simulate(TRACE_FAST, found, plan).seconds <= truth.seconds
    # One that waits for them as long as predicted is shorter for another reason.
    waits_still = replace(timed(truth.seconds), waits=lambda: 0.9 * waits.stall_seconds)
    assert with_links_of(TRACE_FAST, plan, slow, [waits_still]) is None
    # Where something else makes it shorter, too, links are as fast as its waits say.
    faster = replace(slow, links=tuple(_slower(it, 0.5) for it in slow.links))
    twice = simulate(TRACE_FAST, faster, plan)
    mixed = replace(timed(twice.seconds - 4.0), waits=lambda: twice.stall_seconds)
    less = with_links_of(TRACE_FAST, plan, slow, [mixed])
    assert less is not None
    assert less.links[0].duplex_bytes_per_s == 2 * slow.links[0].duplex_bytes_per_s
    # No faster than it takes.
    assert found.links[0].duplex_bytes_per_s <= gpu().links[0].duplex_bytes_per_s * 1.5


def _slower(link: Link, times: float) -> Link:
    curve = tuple((nbytes, rate / times) for nbytes, rate in link.curve)
    return replace(link, curve=curve, duplex_bytes_per_s=link.duplex_bytes_per_s / times)


@pytest.mark.parametrize("share", [0.0, 0.9, 1.2])
def test_links_that_agree_or_are_not_waited_for_stay(share: float) -> None:
    plan = plan_of(TRACE_FAST, Offload(Tier.HOST, 0, 1, 3, 3))
    seconds = simulate(TRACE_FAST, gpu(), plan).seconds
    assert with_links_of(TRACE_FAST, plan, gpu(), [timed(share * seconds)]) is None
    # Where nothing waits for a copy, kernels are what was too slow.
    assert with_links_of(TRACE_FAST, EVERYTHING_KEPT, gpu(), [timed(0.5 * seconds)]) is None


def test_links_beside_kernels_are_as_slow_as_an_iteration_waits_for_them() -> None:
    plan = plan_of(TRACE_FAST, Offload(Tier.HOST, 0, 1, 3, 3))
    slow = replace(gpu(), links=tuple(_slower(link, 1.15) for link in gpu().links))
    truth, probed = simulate(TRACE_FAST, slow, plan), simulate(TRACE_FAST, gpu(), plan)
    seen = replace(timed(truth.seconds), waits=lambda: truth.stall_seconds)
    found = with_links_of(TRACE_FAST, plan, gpu(), [timed(99.0), seen])
    assert found is not None
    assert simulate(TRACE_FAST, found, plan).seconds == pytest.approx(truth.seconds, rel=0.01)
    # What flushes have held up does not count beside others, nor alone.
    flushed = replace(seen, ended=0.9 * truth.seconds, waits=lambda: 9.0, retries=1)
    assert with_links_of(TRACE_FAST, plan, gpu(), [flushed, seen]) == found
    assert with_links_of(TRACE_FAST, plan, gpu(), [replace(seen, retries=1)]) is None
    # What is longer for another reason, or waits no longer than the noise, says nothing of links.
    for agreed in (
        replace(seen, waits=lambda: probed.stall_seconds),
        replace(seen, ended=probed.seconds),
    ):
        assert with_links_of(TRACE_FAST, plan, gpu(), [agreed]) is None


def test_waits_that_were_not_foretold_are_of_slower_links_where_these_explain_them() -> None:
    trace = trace_of([4.0, 4.0, 4.0, 4.0], [(3, 0, 3)])
    plan = plan_of(trace, Offload(Tier.HOST, 0, 2, 2, 3))
    slow = replace(gpu(), links=tuple(_slower(link, 1.4) for link in gpu().links))
    truth, probed = simulate(trace, slow, plan), simulate(trace, gpu(), plan)
    assert probed.stall_seconds == 0 < truth.stall_seconds
    seen = replace(timed(truth.seconds), waits=lambda: truth.stall_seconds)
    found = with_links_of(trace, plan, gpu(), [seen])
    assert found is not None
    assert simulate(trace, found, plan).seconds == pytest.approx(truth.seconds, rel=0.02)
    # No such links make an iteration wait for so long.
    longer = replace(timed(3 * truth.seconds), waits=lambda: 2 * truth.seconds)
    assert with_links_of(trace, plan, gpu(), [longer]) is None
