from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, count

import numpy as np
import pytest

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Budget
from belady.ir.trace import Trace
from belady.planners import tvdnn_branch, tvdnn_ilp
from belady.planners.base import attempt
from belady.planners.moves import Case
from belady.planners.tvdnn import Swapping
from belady.planners.tvdnn_branch import Best, Search
from belady.planners.tvdnn_chain import Chain, chain_of
from belady.planners.tvdnn_greedy import schedule
from belady.planners.tvdnn_ilp import TOLERANCE, TVDNN_ILP, TvdnnIlp
from belady.planners.tvdnn_least import Least
from belady.planners.tvdnn_sets import Sets, nothing
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import MIB, cpu, gpu
from tests.unit.planners.test_tvdnn_greedy import (
    between,
    chain,
    peak,
    random_chain,
)
from tests.unit.planners.test_tvdnn_ilp import PROVED, UNIT, crossing, floor_alone, no_chain, why
from tests.unit.simulate import cases

SLOW = 2.5e10


def pyramid(seed: int, layers: int) -> Trace:
    """Values are halved now and then, as in VGG; copies take about as long as ops."""
    rng = random.Random(seed)
    halved = set(rng.sample(range(2, layers - 1), rng.choice((3, 4, 5))))
    sizes, seconds, nbytes = [], [], 16 * MIB
    for layer in range(layers):
        nbytes //= 2 if layer in halved else 1
        sizes.append(nbytes if rng.random() < 0.7 else nbytes // 2)
        seconds.append(rng.randrange(10, 60) * nbytes // (2 * MIB) + 5)
    return chain(sizes, seconds)


def mixed_chain(seed: int) -> tuple[Trace, HardwareProfile]:
    """Layers that save one side or both, or take workspace; links from slow to fast."""
    rng = random.Random(seed)
    device = rng.choice(("cuda", "cuda", "cuda", "cpu"))
    specs = [
        OpSpec(
            nbytes=rng.choice((MIB, MIB, 2 * MIB, rng.randrange(MIB // 4, 4 * MIB))),
            device_us=rng.randrange(1, 60),
            host_us=rng.choice((0, 5, 30)),
            saves_output=rng.random() < 0.3,
            saves_input=rng.random() < 0.8,
            workspace_bytes=rng.choice((0, 0, 2 * MIB)),
        )
        for _ in range(rng.randrange(4, 11))
    ]
    trace = build_trace(
        specs, device=device, input_held=rng.random() < 0.5, every_boundary=rng.random() < 0.3
    )
    # Values may be held for a while after their copy-out was issued.
    held = rng.choice((0, 0, 1, 3))
    storages = [
        replace(it, released=min(it.released + held, len(specs))) if it.birth >= 0 else it
        for it in trace.storages
    ]
    trace = replace(trace, storages=tuple(storages))
    return trace, cpu() if device == "cpu" else gpu(link_rate=rng.choice((1e10, SLOW, 1e11)))


def stepped_chain(seed: int) -> Trace:
    """Values of one, two or three MiB."""
    rng = random.Random(seed)
    sizes = [rng.choice((1, 2, 3)) * MIB for _ in range(11)]
    return chain(sizes, [rng.randrange(5, 90) for _ in range(11)])


def the_chain(trace: Trace, hardware: HardwareProfile, budget: Budget) -> Chain:
    found = chain_of(Swapping(Case(trace, hardware, budget)))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("trace", "link_rate", "share"),
    [
        (random_chain(3, 32), 5e10, 0.35),
        (random_chain(11, 32), SLOW, 0.5),
        (pyramid(1011, 32), SLOW, 0.5),
        (chain([MIB] * 32, [10] * 32), SLOW, 0.5),
    ],
    ids=["tight", "half", "pyramid", "equal"],
)
def test_uneven_chains_of_32_layers_are_solved_in_a_third_of_the_time(
    trace: Trace, link_rate: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    heuristic = []
    monkeypatch.setattr(
        tvdnn_ilp, "schedule", lambda *case: heuristic.append(schedule(*case)) or heuristic[0]
    )
    hardware = gpu(link_rate=link_rate)
    budget = Budget(int(share * peak(trace, hardware)))
    made = TvdnnIlp(limit_s=20.0)(trace, hardware, budget)
    assert PROVED in why(made)
    assert check(trace, hardware, made, budget).ok
    assert made.predicted_seconds <= (1 + TOLERANCE) * heuristic[0].predicted_seconds
    assert heuristic[0].predicted_seconds <= 1.05 * made.predicted_seconds


def test_the_solver_finds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvdnn_ilp, "schedule", floor_alone)
    compared = 0
    for seed in (*range(18), 166, 204):
        trace, hardware = mixed_chain(seed)
        budget = between(trace, hardware, (0.0, 0.1, 0.3, 0.5, 0.8)[seed % 5])
        swapping = Swapping(Case(trace, hardware, budget))
        if peak(trace, hardware) <= budget.device_bytes or chain_of(swapping) is None:
            continue
        compared += 1
        ours = TVDNN_ILP(trace, hardware, budget)
        with monkeypatch.context() as patched:
            patched.setattr(tvdnn_ilp, "chain_of", no_chain)
            theirs = TVDNN_ILP(trace, hardware, budget)
        assert ours.predicted_seconds == pytest.approx(theirs.predicted_seconds, rel=TOLERANCE), (
            seed
        )
    assert compared > 12


def searched(chain: Chain, deadline: float = float("inf")) -> Best:
    return Search(chain, 1.0, 1e-15, 0.0).run(deadline)


@pytest.mark.parametrize(
    ("trace", "share"),
    [
        *((random_chain(seed, 11), 0.1 * seed) for seed in (0, 3, 6)),
        # The same bytes come from many sets here.
        *((stepped_chain(seed), share) for seed, share in ((7, 0.5), (31, 0.1), (31, 0.3))),
    ],
)
def test_no_set_is_left_that_is_better(
    trace: Trace, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = gpu(link_rate=SLOW)
    found = the_chain(trace, hardware, between(trace, hardware, share))
    quick = searched(found)
    monkeypatch.setattr(Least, "stall", lambda *args: np.zeros(len(args[-1])))
    monkeypatch.setattr(Sets, "undominated", lambda sets, *_: np.arange(len(sets)))
    monkeypatch.setattr(Least, "__init__", lambda *_: None)
    every = searched(found)
    assert quick.complete
    assert every.complete
    assert cost(found, quick.used) == pytest.approx(cost(found, every.used), abs=1e-12)


def walked(chain: Chain, used: Sequence[int]) -> Iterator[Sets]:
    """A set by itself: when the copies of each gap may begin, and after the last."""
    sets = nothing(chain)
    for index in range(used[-1] + 1):
        yield sets
        if index in used:
            sets = sets.having(chain, index)
        if index < used[-1]:
            sets = sets.moved(chain, index)
    yield sets


def stalls(chain: Chain, used: Sequence[int]) -> list[float]:
    """Seconds of stall on both sides."""
    *_, ended = walked(chain, used)
    ends = zip(ended.lanes, chain.sides, strict=True)
    return [float(lane.ended(side, used[-1])[0]) for lane, side in ends]


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_no_set_stalls_for_less_than_the_least(share: float) -> None:
    rng, hardware = random.Random(3), gpu(link_rate=5e10)
    sizes = [rng.choice((MIB // 8, MIB, 4 * MIB)) + rng.randrange(MIB // 8) for _ in range(10)]
    trace = chain(sizes, [rng.randrange(5, 60) for _ in range(10)])
    found = the_chain(trace, hardware, between(trace, hardware, share))
    bounds = [Least(found, side) for side in found.sides]
    tight = []
    for size in range(1, 10):
        for used in combinations(range(len(found.nbytes)), size):
            total = int(found.nbytes[list(used)].sum())
            if total < found.need or total - found.nbytes[used[-1]] >= found.need:
                continue
            ends = stalls(found, used)
            if not np.isfinite(ends).all():
                continue
            for index, sets in zip(range(used[-1] + 1), walked(found, used), strict=False):
                rows = zip(sets.lanes, found.sides, bounds, ends, strict=True)
                for lane, side, bound, end in rows:
                    late = lane.busy - (side.begin[index] + lane.stalled)
                    least = lane.stalled + bound.stall(index, sets.nbytes, late)
                    assert least[0] <= end + 1e-12
                    tight.append(least[0] > 0.999 * end > 0)
    assert sum(tight) > 10


def cost(chain: Chain, used: list[int] | None) -> float:
    """Seconds of stall of a set, and what its bytes cost."""
    assert used is not None
    return 1e-15 * int(chain.nbytes[used].sum()) + sum(stalls(chain, used))


def test_a_set_takes_as_long_as_its_simulation() -> None:
    trace, hardware = random_chain(3, 32), gpu(link_rate=SLOW)
    budget = Budget(peak(trace, hardware) // 2)
    swapping = Swapping(Case(trace, hardware, budget))
    found = the_chain(trace, hardware, budget)
    best = searched(found)
    assert best.used is not None
    moves = {
        value: move
        for index, (free, back) in found.schedule(best.used).items()
        for value, move in swapping.gaps[index].away(free, back).items()
    }
    made = attempt(swapping.case, swapping.draft("set/1", moves, "best"))
    assert made is not None
    stall = sum(stalls(found, best.used))
    assert made.predicted_seconds == pytest.approx(swapping.keep_seconds + stall, rel=1e-9)
    assert stall > 0.1 * swapping.keep_seconds


def test_what_is_said_of_others_when_time_is_up_is_true(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hardware = random_chain(11, 22), gpu(link_rate=SLOW)
    found = the_chain(trace, hardware, Budget(peak(trace, hardware) // 2))
    monkeypatch.setattr(tvdnn_branch, "_CELLS", 1 << 18)
    least = sum(stalls(found, searched(found).used or []))
    said = []
    for batches in (0, 1, 10, 40):
        ticks = count()
        monkeypatch.setattr(tvdnn_branch.time, "monotonic", lambda at=ticks: next(at))
        best = searched(found, deadline=batches)
        assert not best.complete
        assert best.stall <= least
        said.append(best.stall)
    assert said[0] == 0
    assert said == sorted(said)
    assert said[-1] > 0.8 * least


@pytest.mark.parametrize(
    ("trace", "hardware", "budget"),
    [
        (crossing(), cases.gpu(1.0), Budget(10 * UNIT)),
        # Copies to disk are staged: two lanes, one after the other.
        (random_chain(3, 8), gpu(disk=True), Budget(8 * MIB, host_bytes=0)),
    ],
    ids=["crossing", "staged"],
)
def test_what_is_no_chain_is_the_solvers(
    trace: Trace, hardware: HardwareProfile, budget: Budget
) -> None:
    swapping = Swapping(Case(trace, hardware, budget))
    assert (swapping.over > 0).any()
    assert chain_of(swapping) is None
