"""What a replay passes stays for those after it, where there is room."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from belady.ir.legality import check
from belady.ir.plan import Plan, Recompute
from belady.ir.replay import seconds_of
from belady.ir.trace import Trace
from belady.planners import plan
from belady.planners.mix import Mixer
from belady.planners.moves import Case
from belady.planners.sharing import held, passing, unshared
from belady.planners.spread import boundary_times
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
