from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.trace import Tier, Trace
from belady.planners import plan, smallest_budget
from belady.planners.moves import Case
from belady.planners.tvdnn import Swapping
from belady.planners.tvdnn_ilp import TVDNN_ILP
from belady.planners.tvdnn_pick import Picks
from belady.simulate import simulate
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import instances, random_trace
from tests.unit.planners.nets import MIB, cpu, gpu

POLICY = "tvdnn_greedy"


def chain(sizes: list[int], device_us: list[int], *, device: str = "cuda") -> Trace:
    """Forward ops that save their inputs; op i writes ``sizes[i]`` bytes."""
    specs = [
        OpSpec(nbytes=nbytes, device_us=seconds)
        for nbytes, seconds in zip(sizes, device_us, strict=True)
    ]
    return build_trace(specs, device=device, input_held=False)


def random_chain(seed: int, layers: int) -> Trace:
    rng = random.Random(seed)
    sizes = [rng.randrange(MIB // 4, 3 * MIB) for _ in range(layers)]
    return chain(sizes, [rng.randrange(5, 40) for _ in range(layers)])


def shrinking_chain(seed: int) -> Trace:
    """Values get smaller block by block, as where a network for images pools."""
    rng = random.Random(seed)
    sizes: list[int] = []
    seconds: list[int] = []
    nbytes = rng.randrange(8, 24) * MIB
    for _ in range(rng.randrange(3, 6)):
        for _ in range(rng.randrange(1, 4)):
            sizes.append(nbytes)
            seconds.append(rng.randrange(20, 300))
        nbytes //= rng.choice((2, 4))
        sizes.append(nbytes)
        seconds.append(rng.randrange(1, 20))
    return chain(sizes, seconds)


def residual_net(seed: int, layers: int) -> Trace:
    rng = random.Random(seed)
    specs = [
        OpSpec(
            nbytes=rng.randrange(MIB // 4, 4 * MIB),
            device_us=rng.randrange(5, 60),
            join=layer % 3 == 2,
            saves_output=rng.random() < 0.3,
            saves_input=rng.random() < 0.8,
            workspace_bytes=rng.choice((0, MIB)),
        )
        for layer in range(layers)
    ]
    return build_trace(specs)


def peak(trace: Trace, hardware: HardwareProfile) -> int:
    return simulate(trace, hardware, Plan(trace.fingerprint, "keep", Budget(0))).peak(Tier.DEVICE)


def between(trace: Trace, hardware: HardwareProfile, share: float) -> Budget:
    """Budget at this share of the way from the smallest one to what plain training needs."""
    least = smallest_budget(POLICY, trace, hardware, Budget(0))
    return Budget(least + round(share * (peak(trace, hardware) - least)))


@pytest.mark.parametrize("share", [0.05, 0.3, 0.6])
@pytest.mark.parametrize(
    "trace",
    [random_chain(seed, 11) for seed in range(4)] + [residual_net(seed, 15) for seed in range(6)],
    ids=[f"chain {seed}" for seed in range(4)] + [f"residual {seed}" for seed in range(6)],
)
def test_at_most_a_twentieth_over_the_integer_program(trace: Trace, share: float) -> None:
    within_a_twentieth(trace, gpu(), between(trace, gpu(), share))


@pytest.mark.parametrize(
    "trace",
    [
        *(random_chain(seed, 8) for seed in range(6)),
        *(shrinking_chain(seed) for seed in (6, 9, 15, 18)),
        *(residual_net(seed, 12) for seed in (1, 3, 15)),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_so_it_is_where_copies_take_longer_than_compute(trace: Trace, share: float) -> None:
    hardware = gpu(link_rate=1.5e10)
    within_a_twentieth(trace, hardware, between(trace, hardware, share))


def within_a_twentieth(trace: Trace, hardware: HardwareProfile, budget: Budget) -> None:
    best = TVDNN_ILP(trace, hardware, budget)
    (reason,) = {it.reason for it in best.assignments if isinstance(it.decision, Offload)}
    assert "the program has no faster schedule" in reason
    made = plan(POLICY, trace, hardware, budget)
    assert made.predicted_seconds <= 1.05 * best.predicted_seconds


@given(case=instances(max_ops=9), share=st.sampled_from((0.0, 0.2, 0.7, 1.0)))
@settings(max_examples=60, deadline=None)
def test_legal_and_the_same_every_time(case: tuple[Trace, HardwareProfile], share: float) -> None:
    trace, hardware = case
    margin = hardware.allocator.budget_for
    least = smallest_budget(POLICY, trace, hardware, Budget(0))
    full = max(least, margin(peak(trace, hardware)))
    budget = Budget(least + round(share * (full - least)))
    made = plan(POLICY, trace, hardware, budget)
    assert check(trace, hardware, made, budget).ok
    assert made.predicted_seconds == simulate(trace, hardware, made).seconds
    assert made == plan(POLICY, trace, hardware, budget)
    assert made.moves_nothing or budget.device_bytes < full


def test_the_gap_with_most_bytes_and_slack_is_used_alone_where_it_is_enough() -> None:
    # Op 0 writes less, what op 3 writes is idle for less.
    trace = chain([MIB, 4 * MIB, MIB, 4 * MIB, MIB, MIB], [50] * 6)
    hardware = gpu()
    budget = Budget(peak(trace, hardware) - MIB)
    made = plan(POLICY, trace, hardware, budget)
    assert [trace.values[value].producer for value in made.decisions] == [1]
    assert made.predicted_seconds == pytest.approx(without_stalls(trace, hardware), rel=1e-6)


def without_stalls(trace: Trace, hardware: HardwareProfile) -> float:
    return simulate(trace, hardware, Plan(trace.fingerprint, "keep", Budget(0))).seconds


def test_what_later_picks_make_needless_is_given_back() -> None:
    trace = random_trace(7, 80)
    budget = between(trace, gpu(), 0.4)
    swapping = Swapping(Case(trace, gpu(), budget))
    picks = Picks(swapping)
    chosen = picks.pick(0.0)
    assert chosen
    slack = picks.slack(chosen)
    assert slack.min() >= 0
    for index in chosen:
        gap = swapping.gaps[index]
        assert (slack[gap.gone : gap.back] < gap.nbytes).any()


def test_what_is_turned_is_turned_and_there_is_room() -> None:
    trace = random_chain(7, 20)
    swapping = Swapping(Case(trace, gpu(), between(trace, gpu(), 0.1)))
    picks = Picks(swapping)
    chosen = picks.pick(0.0)
    needed = 0
    for index in range(len(swapping.gaps)):
        found = list(picks.turned(chosen, frozenset((index,))))
        needed += not found
        for other in found:
            assert (index in other) != (index in chosen)
            assert picks.slack(other).min() >= 0
    assert 0 < needed < len(chosen)


def test_nothing_moves_when_everything_fits() -> None:
    trace = random_chain(1, 8)
    made = plan(POLICY, trace, gpu(), Budget(peak(trace, gpu())))
    assert made.moves_nothing
    assert made.planner == "tvdnn_greedy/2"


def test_more_memory_hardly_ever_costs_time() -> None:
    trace = random_chain(2, 14)
    seconds = [
        plan(POLICY, trace, gpu(), between(trace, gpu(), share / 10)).predicted_seconds
        for share in range(11)
    ]
    assert seconds[0] > 1.2 * seconds[-1]
    for more, less in zip(seconds[1:], seconds, strict=False):
        assert more <= 1.02 * less


def test_a_cpu_spills_to_disk() -> None:
    trace = replace(random_chain(3, 10), device="cpu")
    made = plan(POLICY, trace, cpu(), between(trace, cpu(), 0.3))
    assert {it.tier for it in made.decisions.values() if isinstance(it, Offload)} == {Tier.DISK}


def test_a_budget_below_the_floor_is_refused_with_the_smallest_that_is_not() -> None:
    trace = random_chain(4, 8)
    least = smallest_budget("floor", trace, gpu(), Budget(0))
    with pytest.raises(InfeasibleBudgetError) as refused:
        plan(POLICY, trace, gpu(), Budget(least - 1))
    assert refused.value.smallest_bytes == least
    assert plan(POLICY, trace, gpu(), Budget(least)).decisions
