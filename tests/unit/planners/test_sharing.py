"""What a replay passes stays for those after it, where there is room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan, Recompute
from belady.ir.replay import seconds_of
from belady.ir.trace import Tier, Trace
from belady.planners import plan
from belady.planners.mix import Mixer
from belady.planners.moves import Case
from belady.planners.replays import cheapest
from belady.planners.sharing import Branches, early, held, joined, passing, unshared
from belady.planners.spread import boundary_times
from belady.planners.ways import Ways
from belady.planners.wish import Away, Wish
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import random_trace
from tests.unit.planners.nets import gpu
from tests.unit.planners.test_hybrid import MB, budgets

# So slow that nothing is worth a copy.
SLOW = 2e9


def _block(nbytes: int) -> list[OpSpec]:
    """An op that must be kept or copied, and five that are made again from there."""
    again = OpSpec(nbytes=nbytes, device_us=400, saves_output=True, replayable=True)
    return [OpSpec(nbytes=nbytes, device_us=3000, replayable=False), *[again] * 5]


# Where the first block has no room to hold anything, the others have.
NET = [*_block(200 * MB), *_block(30 * MB), *_block(30 * MB), *_block(30 * MB)]


def _replays(made: Plan) -> dict[int, Recompute]:
    return {v: it for v, it in made.decisions.items() if isinstance(it, Recompute)}


def _runs(made: Plan) -> Counter[int]:
    """How often each op runs again."""
    return Counter(op for it in _replays(made).values() for op in it.ops)


def _seconds(trace: Trace, made: Plan) -> float:
    return sum(seconds_of(trace, it) for it in _replays(made).values())


def test_each_op_runs_again_once_where_there_is_room() -> None:
    trace, hardware = build_trace(NET), gpu(link_rate=SLOW)
    (budget,) = budgets(trace, hardware, 0.7)
    mixer = Mixer(Case(trace, hardware, budget), "mix/1")
    alone, sharing = mixer.make(Wish(frozenset(mixer.ways.cost)), boundary_times(trace, None))
    runs = [
        Counter(op for it in _replays(made).values() for op in it.ops) for made in (alone, sharing)
    ]
    assert max(runs[0].values()) > 1
    assert set(runs[1].values()) == {1}
    assert set(_replays(alone)) == set(_replays(sharing))
    assert _seconds(trace, sharing) < _seconds(trace, alone)
    assert check(trace, hardware, sharing, budget).ok


def test_without_room_nothing_is_shared() -> None:
    trace, hardware = build_trace(NET), gpu(link_rate=SLOW)
    (budget,) = budgets(trace, hardware, 0.5)
    mixer = Mixer(Case(trace, hardware, budget), "mix/1")
    (alone,) = mixer.make(Wish(frozenset(mixer.ways.cost)), boundary_times(trace, None))
    assert max(_runs(alone).values()) > 1


# Of the first twelve those in which something can be shared: of others both plans are the same one.
@pytest.mark.parametrize(
    ("share", "seed"),
    [
        *((0.1, seed) for seed in (0, 1, 3, 5, 7, 9, 11)),
        *((0.3, seed) for seed in (0, 1, 2, 3, 7, 9, 10, 11)),
        *((0.6, seed) for seed in (0, 1, 11)),
    ],
)
def test_sharing_makes_no_plan_slower(
    seed: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, hardware = random_trace(seed, 60), gpu(link_rate=SLOW)
    (budget,) = budgets(trace, hardware, share)
    shared: list[bool] = []
    sharing_of = Mixer._sharing

    def noted(mixer: Mixer, made: Plan, wish: Wish, away: Away) -> Plan | None:
        found = sharing_of(mixer, made, wish, away)
        shared.append(found is not None)
        return found

    monkeypatch.setattr(Mixer, "_sharing", noted)
    sharing = plan("hybrid", trace, hardware, budget)
    assert any(shared)
    monkeypatch.setattr(Mixer, "_sharing", lambda *_: None)
    alone = plan("hybrid", trace, hardware, budget)
    assert sharing.predicted_seconds <= 1.001 * alone.predicted_seconds


def test_what_is_passed_stays_only_where_there_is_room() -> None:
    trace = build_trace(_block(MB))
    replays = {
        value: Recompute(tuple(range(1, trace.values[value].producer + 1)), at)
        for value in trace.saved
        if trace.values[value].producer > 1 and (at := trace.values[value].first_read) is not None
    }
    nbytes = dict.fromkeys(replays, 10)
    first = min(it.at for it in replays.values())
    others = frozenset(value for value, it in replays.items() if it.at > first)
    assert len(others) > 1
    ways = passing(trace, replays)
    assert frozenset(ways) == others

    def kept(room: int) -> frozenset[int]:
        return held(trace, replays, ways, nbytes, np.full(len(trace.ops), room))

    assert kept(1000) == others
    assert kept(0) == frozenset()
    assert len(kept(10)) == 1


@pytest.mark.parametrize("every_boundary", [True, False])
def test_what_others_run_all_the_same_is_spared_by_keeping_none(every_boundary: bool) -> None:
    trace = build_trace([OpSpec(replayable=True)] * 6, every_boundary=every_boundary)
    replays = {2: Recompute((0, 1, 2), 9), 3: Recompute((1, 3), 9), 4: Recompute((1, 4), 8)}
    spared = {value: it.ops for value, it in unshared(trace, replays).items()}
    if every_boundary:
        # That of another boundary runs op 1 by itself.
        assert spared == {2: (0, 2), 3: (3,), 4: (1, 4)}
    else:
        assert spared == {value: it.ops for value, it in replays.items()}


def forked(*rest_us: int, every_boundary: bool = True) -> tuple[Trace, Away]:
    """Values that branch off after one op of 400 us, by others; the last of them is read first."""
    again = OpSpec(saves_input=False, device_us=400, replayable=True)
    branch = [
        replace(again, device_us=us, saves_output=True, branch=place)
        for place, us in enumerate(rest_us)
    ]
    joins = [OpSpec(saves_input=False, join=True)] * (len(rest_us) - 1)
    trace = build_trace(
        [OpSpec(saves_input=False, saves_output=True), again, *branch, *joins],
        every_boundary=every_boundary,
    )
    replays = {
        value: replay for value in trace.saved if (replay := cheapest(trace, value)) is not None
    }
    assert {it.ops for it in replays.values()} == {(1, 2 + at) for at in range(len(rest_us))}
    return trace, Away({}, replays, {})


def made_at(replays: Mapping[int, Recompute] | None) -> list[int]:
    assert replays is not None
    return sorted(it.at for it in replays.values())


def in_room(trace: Trace, away: Away, room: int) -> list[int] | None:
    """When values are made again where there is so much room."""
    slack = np.full(len(trace.ops), room)
    ways = Ways(Case(trace, gpu(), Budget(1 << 30)), dict.fromkeys(away.replays, 1024))
    replays = joined(trace, away, ways, slack)
    # What is made early takes nothing of what others are told is left.
    assert set(slack) == {room}
    return None if replays is None else made_at(replays)


def test_a_replay_that_branches_off_can_come_early() -> None:
    trace, away = forked(20, 20)
    branches = Branches(trace, away.replays)
    first, later = branches.order
    assert branches.spared(first, np.inf) == ({}, pytest.approx(420e-6))
    assert branches.spared(later, np.inf) == (
        {away.replays[first].at: pytest.approx(400e-6)},
        pytest.approx(420e-6),
    )
    assert branches.spared(later, 0)[0] == {}
    branches.bring(later, away.replays[first].at)
    assert branches.spared(first, np.inf) == ({}, pytest.approx(20e-6))


def test_what_shares_nothing_comes_no_earlier() -> None:
    trace, away = forked(20, 20, every_boundary=False)
    assert Branches(trace, away.replays).order == []
    trace, away = forked(20, 20)
    ops = [replace(op, mutates=(at == 3)) for at, op in enumerate(trace.ops)]
    assert len(Branches(replace(trace, ops=tuple(ops)), away.replays).order) == 1


@pytest.mark.parametrize("count", [3, 4])
def test_all_that_branch_off_come_to_where_the_first_one_is(count: int) -> None:
    trace, away = forked(*[20] * count)
    first = made_at(away.replays)[0]
    assert made_at(early(trace, away.replays, 100)) == [first] * count
    assert in_room(trace, away, 1 << 20) == [first] * count


@pytest.mark.parametrize(("reach", "rest_us", "comes"), [(0, 20, 0), (1, 20, 1), (1, 500, 0)])
def test_replays_come_early_within_reach_where_they_run_little_else(
    reach: int, rest_us: int, comes: int
) -> None:
    trace, away = forked(rest_us, 20)
    first, later = made_at(away.replays)
    assert made_at(early(trace, away.replays, reach)) == [first, later - comes]


@pytest.mark.parametrize(("room", "comes"), [(1024, True), (1023, False)])
def test_replays_come_early_as_far_as_there_is_room(room: int, comes: bool) -> None:
    trace, away = forked(500, 20)
    assert in_room(trace, away, room) == ([made_at(away.replays)[0]] * 2 if comes else None)


def test_a_replay_waits_for_what_it_starts_from() -> None:
    trace, away = forked(500, 20)
    (source,) = set(trace.saved) - set(away.replays)
    first, later = made_at(away.replays)
    for ready_by, found in ((later, None), (first, [first, first])):
        moves = {source: Offload(Tier.HOST, 0, 1, first, ready_by)}
        assert in_room(trace, replace(away, moves=moves), 1 << 20) == found


def test_in_a_plan_an_op_of_two_values_runs_again_once() -> None:
    """Blocks like a GELU that is written out, of which neither value passes the other."""
    nbytes = 64 * MB
    again = OpSpec(nbytes=nbytes, saves_input=False, device_us=4000, replayable=True)
    branch = replace(again, device_us=100, saves_output=True)
    start = OpSpec(nbytes=nbytes // 8, saves_input=False, saves_output=True)
    join = OpSpec(nbytes=nbytes // 8, saves_input=False, join=True)
    trace = build_trace(
        [start, again, branch, replace(branch, branch=1), join] * 8, every_boundary=True
    )
    hardware = gpu(link_rate=SLOW)
    (budget,) = budgets(trace, hardware, 0.3)
    made = plan("hybrid", trace, hardware, budget)
    costly = {at for at, op in enumerate(trace.ops[:40]) if op.device_seconds == 4000e-6}
    both = [it for it in _replays(made).values() if costly.intersection(it.ops)]
    at = {(op, it.at) for it in both for op in costly.intersection(it.ops)}
    assert len(both) > len(at)
    assert len(at) == len({op for op, _ in at})


@pytest.mark.parametrize("limits", [{"early": 64.0}, {"reach": 4.0}, {"spare": 0.01}])
def test_alike_plans_of_other_limits_may_share_otherwise(
    limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, hardware = build_trace(NET), gpu(link_rate=SLOW)
    (budget,) = budgets(trace, hardware, 0.9)
    mixer, asked = Mixer(Case(trace, hardware, budget), "mix/1"), list[Wish]()
    monkeypatch.setattr(Mixer, "_sharing", lambda _self, _plan, wish, _away: asked.append(wish))
    some = frozenset(sorted(mixer.ways.cost)[:1])
    wishes = [Wish(some), Wish(some, **limits)]
    times = boundary_times(trace, None)
    plans = [mixer.make(wish, times)[0] for wish in (*wishes, *wishes)]
    assert len({it.assignments for it in plans}) == 1
    assert asked == wishes
