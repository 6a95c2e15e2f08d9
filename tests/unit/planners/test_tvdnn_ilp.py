from __future__ import annotations

import builtins
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from types import ModuleType

import pytest

from belady.errors import InfeasibleBudgetError, MissingExtraError
from belady.ir.hardware import Allocator, HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan
from belady.ir.trace import Tier, Trace
from belady.planners import plan, smallest_budget, tvdnn_ilp
from belady.planners.base import assemble, finish
from belady.planners.moves import Case
from belady.planners.tvdnn import Gap, Swapping
from belady.planners.tvdnn_chain import chain_of
from belady.planners.tvdnn_ilp import TOLERANCE, TVDNN_ILP, TvdnnIlp
from belady.simulate import bound, simulate
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine
from tests.unit.planners.nets import MIB, cpu, gpu
from tests.unit.planners.test_tvdnn_greedy import (
    between,
    chain,
    peak,
    random_chain,
    residual_net,
    without_stalls,
)
from tests.unit.simulate import cases

UNIT = 4096
PROVED = "the program has no faster schedule"


def why(made: Plan) -> str:
    (reason,) = {it.reason for it in made.assignments if isinstance(it.decision, Offload)}
    return reason


def floor_alone(swapping: Swapping, planner: str) -> Plan:
    return finish(swapping.case, swapping.draft(planner, swapping.floor.moves, "floor"))


def no_chain(swapping: Swapping) -> None:
    """What everything is to the solver."""


def schedules(trace: Trace, gaps: Sequence[Gap]) -> Iterator[dict[int, Offload]]:
    """Every schedule of the step model: which gaps, where bytes go, where they come back."""
    anchors = trace.anchors or range(len(trace.ops) + 1)
    choices: list[list[tuple[int, int] | None]] = []
    for gap in gaps:
        (move,) = gap.moves.values()
        inside = [at for at in anchors if move.free_at <= at <= gap.back]
        choices.append([None, *((go, come) for go in inside for come in inside if go < come)])
    order = sorted(range(len(gaps)), key=lambda index: (gaps[index].back, index))
    for choice in product(*choices):
        come = [times[1] for index in order if (times := choice[index]) is not None]
        if come == sorted(come):
            pairs = zip(gaps, choice, strict=True)
            yield {v: m for gap, at in pairs if at is not None for v, m in gap.away(*at).items()}


def fastest(trace: Trace, hardware: HardwareProfile, budget: Budget) -> float:
    """Seconds of the fastest schedule of the step model, by trying all."""
    swapping = Swapping(Case(trace, hardware, budget))
    best = inf
    for moves in schedules(trace, swapping.gaps):
        made = assemble(swapping.case, swapping.draft("all/1", moves, "tried"))
        if check(trace, hardware, made, budget).ok:
            best = min(best, simulate(trace, hardware, made).seconds)
    return best


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6])
@pytest.mark.parametrize("seed", range(6))
def test_no_schedule_of_a_tiny_chain_is_faster(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the heuristic would have found must not help.
    monkeypatch.setattr(tvdnn_ilp, "schedule", floor_alone)
    trace = random_chain(seed, 4)
    assert len(Swapping(Case(trace, gpu(), Budget(0))).gaps) == 3
    budget = between(trace, gpu(), share)
    best = fastest(trace, gpu(), budget)
    assert chain_of(Swapping(Case(trace, gpu(), budget)))
    for _ in ("as a chain", "by the solver"):
        made = TVDNN_ILP(trace, gpu(), budget)
        assert why(made) == f"moved: tvDNN's integer program; {PROVED}"
        assert made.predicted_seconds == pytest.approx(best, rel=TOLERANCE)
        monkeypatch.setattr(tvdnn_ilp, "chain_of", no_chain)


def test_no_schedule_of_five_objects_with_branches_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tvdnn_ilp, "schedule", floor_alone)
    sizes = [MIB, 3 * MIB, MIB // 2, 2 * MIB, 2 * MIB, MIB]
    joins = [False, False, True, False, False, True]
    specs = [
        OpSpec(nbytes=nbytes, device_us=20, join=join, branch=int(join), saves_input=not join)
        for nbytes, join in zip(sizes, joins, strict=True)
    ]
    trace = build_trace(specs, input_held=False)
    budget = between(trace, gpu(), 0.4)
    made = TVDNN_ILP(trace, gpu(), budget)
    assert made.predicted_seconds == pytest.approx(fastest(trace, gpu(), budget), rel=TOLERANCE)


def crossing() -> Trace:
    """What is saved first is read first: no chain."""
    sizes = [(5, 0, 7), (5, 4, 11), (10, 2, 3), (10, 8, 9)]
    return cases.trace_of([UNIT] * 14, [(UNIT * size, *ops) for size, *ops in sizes])


@pytest.mark.parametrize(("duplex", "seconds"), [(1.0, 24), (0.8, 25), (0.5, 28)])
def test_directions_that_share_a_path_take_longer(
    duplex: float, seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tvdnn_ilp, "schedule", floor_alone)
    # Values 2 and 3 fill the device: value 0 leaves and returns between, while value 1 leaves.
    trace, hardware, budget = crossing(), cases.gpu(duplex), Budget(10 * UNIT)
    made = TVDNN_ILP(trace, hardware, budget)
    assert PROVED in why(made)
    assert made.predicted_seconds == pytest.approx(seconds * UNIT)
    assert fastest(trace, hardware, budget) == pytest.approx(seconds * UNIT)


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_a_chain_of_32_layers_is_solved(share: float) -> None:
    trace = build_trace([OpSpec(nbytes=MIB, device_us=10) for _ in range(32)])
    hardware = machine(
        "cuda", link_rate=5.5e10, disk=False, disk_rate=1.0, allocator=Allocator(512, 0.0, 0)
    )
    budget = Budget(int(share * peak(trace, hardware)))
    made = TVDNN_ILP(trace, hardware, budget)
    assert PROVED in why(made)
    best = bound(trace, hardware, budget)
    assert 0 <= best.gap(made.predicted_seconds) < 0.05
    assert check(trace, hardware, made, budget).ok


def test_of_schedules_without_stall_the_one_that_moves_least() -> None:
    trace = chain([4 * MIB, 2 * MIB, *[MIB // 4] * 3, 6 * MIB], [400] * 6)
    budget = Budget(peak(trace, gpu()) - 2 * MIB)
    made = TVDNN_ILP(trace, gpu(), budget)
    assert [trace.values[value].producer for value in made.decisions] == [1]
    assert made.predicted_seconds == pytest.approx(without_stalls(trace, gpu()))


@pytest.mark.parametrize("trace", [random_chain(5, 9), residual_net(2, 12)], ids=["chain", "net"])
def test_more_memory_never_costs_time(trace: Trace) -> None:
    seconds = []
    for share in range(9):
        budget = between(trace, gpu(), share / 8)
        made = TVDNN_ILP(trace, gpu(), budget)
        heuristic = plan("tvdnn_greedy", trace, gpu(), budget)
        assert made.predicted_seconds <= (1 + TOLERANCE) * heuristic.predicted_seconds
        seconds.append(made.predicted_seconds)
    assert seconds[0] > 1.05 * seconds[-1]
    for more, less in zip(seconds[1:], seconds, strict=False):
        assert more <= (1 + TOLERANCE) * less


def test_a_cpu_spills_to_disk_over_one_path() -> None:
    trace = replace(random_chain(3, 7), device="cpu")
    budget = between(trace, cpu(), 0.3)
    made = TVDNN_ILP(trace, cpu(), budget)
    assert PROVED in why(made)
    assert {it.tier for it in made.decisions.values() if isinstance(it, Offload)} == {Tier.DISK}
    assert check(trace, cpu(), made, budget).ok


def test_what_cannot_fit_is_refused_without_asking_the_solver() -> None:
    trace = random_chain(4, 8)
    least = smallest_budget("floor", trace, gpu(), Budget(0))
    with pytest.raises(InfeasibleBudgetError) as refused:
        TvdnnIlp(limit_s=0.0)(trace, gpu(), Budget(least - 1))
    assert refused.value.smallest_bytes == least


def test_without_time_the_heuristic_plans_and_the_plan_says_so() -> None:
    trace = random_chain(4, 12)
    budget = between(trace, gpu(), 0.1)
    made = TvdnnIlp(limit_s=0.0)(trace, gpu(), budget)
    heuristic = plan("tvdnn_greedy", trace, gpu(), budget)
    assert made.decisions == heuristic.decisions
    assert "heuristic; the program was stopped after 0 s without a schedule" in why(made)
    gap = heuristic.predicted_seconds / without_stalls(trace, gpu()) - 1
    assert f"no schedule of it is {gap:.2%} faster" in why(made)


def test_a_program_that_is_too_large_is_not_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvdnn_ilp, "_LARGEST", 1)
    monkeypatch.setattr(tvdnn_ilp, "_LONGEST", 10)
    long = random_chain(4, 12)
    for trace, hardware, budget in (
        (long, gpu(), between(long, gpu(), 0.1)),
        (crossing(), cases.gpu(1.0), Budget(10 * UNIT)),
    ):
        made = TVDNN_ILP(trace, hardware, budget)
        assert made.decisions == plan("tvdnn_greedy", trace, hardware, budget).decisions
        assert "heuristic; the program is too large, with" in why(made)
        gap = made.predicted_seconds / without_stalls(trace, hardware) - 1
        assert why(made).endswith(f"choices, no schedule of it is {gap:.2%} faster")


def test_without_scipy_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(
        name: str,
        globals_: Mapping[str, object] | None = None,
        locals_: Mapping[str, object] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        if name.startswith("scipy"):
            raise ImportError(name)
        return real(name, globals_, locals_, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(MissingExtraError, match=r"belady\[solver\].*tvdnn_greedy"):
        TVDNN_ILP(crossing(), cases.gpu(1.0), Budget(10 * UNIT))
    trace = random_chain(4, 8)
    assert PROVED in why(TVDNN_ILP(trace, gpu(), between(trace, gpu(), 0.5)))
    assert TVDNN_ILP(trace, gpu(), Budget(peak(trace, gpu()))).moves_nothing
