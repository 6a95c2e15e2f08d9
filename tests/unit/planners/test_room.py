"""Who is given the room of a budget: what stays, copies under way, and nobody."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from belady.ir.legality import check
from belady.ir.plan import Budget, Offload, Plan, Recompute
from belady.ir.timeline import Cause
from belady.ir.trace import Phase, Trace
from belady.planners import plan
from belady.planners.mix import Mixer
from belady.planners.moves import Case
from belady.planners.spread import Bytes, Times, boundary_times, slack_of
from belady.planners.wish import Wish
from belady.simulate import simulate
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import gpu
from tests.unit.planners.test_hybrid import MB, budgets, chain
from tests.unit.planners.test_sharing import NET, SLOW

# What only a copy brings back, and what an op makes again that takes long.
FIXED = OpSpec(nbytes=50 * MB, device_us=2000, saves_output=True)
AGAIN = OpSpec(
    nbytes=100 * MB, device_us=3000, saves_input=False, saves_output=True, replayable=True
)


def _held_on(trace: Trace, ops: int) -> Trace:
    """The trace with what is saved held by others for so many ops more, as residuals are."""
    saved = {trace.values[value].storage for value in trace.saved}
    storages = tuple(
        replace(it, released=min(it.released + ops, it.death))
        if index in saved and not it.persistent
        else it
        for index, it in enumerate(trace.storages)
    )
    return replace(trace, storages=storages)


def test_nothing_waits_for_a_copy_of_what_others_hold_for_longer() -> None:
    trace, hardware = _held_on(chain(24, replayable=False), 3), gpu(link_rate=400e9)
    (budget,) = budgets(trace, hardware, 0.5)
    made = plan("lifetime", trace, hardware, budget)
    moves = [it for it in made.decisions.values() if isinstance(it, Offload)]
    assert len(moves) > 4
    stalls = simulate(trace, hardware, made).stalls
    assert not [it for it in stalls if it.cause is Cause.COPY_OUT]


def test_where_copies_come_first_replays_have_what_they_leave() -> None:
    trace, hardware = build_trace([FIXED, AGAIN] * 16), gpu(link_rate=50e9)
    (budget,) = budgets(trace, hardware, 0.5)
    mixer = Mixer(Case(trace, hardware, budget), "mix/1")
    every, times = frozenset(mixer.ways.cost), boundary_times(trace, None)
    kept, *_ = mixer.make(Wish(every), times)
    copied, *_ = mixer.make(Wish(every, reserve=inf), times)
    assert {type(it) for it in kept.decisions.values()} == {Recompute}
    assert {type(it) for it in copied.decisions.values()} == {Recompute, Offload}
    seconds = [simulate(trace, hardware, made).seconds for made in (kept, copied)]
    assert seconds[1] < 0.95 * seconds[0]


def test_the_search_tries_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """That copies come first from the beginning, and that bytes are left: of small traces too."""
    # Of a link that costs time: where a plan costs none, no other is tried.
    trace, hardware = build_trace([FIXED, AGAIN] * 16), gpu(link_rate=10e9)
    (budget,) = budgets(trace, hardware, 0.5)
    tried, make = list[Wish](), Mixer.make

    def made(mixer: Mixer, wish: Wish, times: Times) -> list[Plan]:
        tried.append(wish)
        return make(mixer, wish, times)

    monkeypatch.setattr(Mixer, "make", made)
    plan("hybrid", trace, hardware, budget)
    first = next(at for at, wish in enumerate(tried) if wish.spare)
    assert len({wish.values for wish in tried[:first] if wish.reserve == inf}) > 1
    assert len({wish.spare for wish in tried}) > 2


@pytest.mark.parametrize("reserve", [0.0, inf])
def test_what_is_spared_is_left(reserve: float) -> None:
    trace, hardware = build_trace([FIXED, AGAIN] * 16), gpu(link_rate=50e9)
    (budget,) = budgets(trace, hardware, 0.5)
    mixer = Mixer(Case(trace, hardware, budget), "mix/1")
    peaks = []
    for spare in (0.0, 0.1):
        wish = Wish(frozenset(mixer.ways.cost), reserve=reserve, spare=spare)
        made, *_ = mixer.make(wish, boundary_times(trace, None))
        peaks.append(check(trace, hardware, made, budget).peak_bytes)
        assert peaks[-1] <= (1 - spare) * budget.device_bytes
    assert peaks[0] > 0.9 * budget.device_bytes


def test_what_replays_share_takes_nothing_that_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, hardware = build_trace(NET), gpu(link_rate=SLOW)
    (budget,) = budgets(trace, hardware, 0.7)
    case, given = Case(trace, hardware, budget), list[Bytes]()

    def nothing(*asked: Any) -> frozenset[int]:
        given.append(asked[-1])
        return frozenset()

    monkeypatch.setattr("belady.planners.sharing.held", nothing)
    mixer = Mixer(case, "mix/1")
    wish = Wish(frozenset(mixer.ways.cost), spare=0.1)
    (alone,) = mixer.make(wish, boundary_times(trace, None))
    (slack,) = given
    assert set(slack_of(case, alone) - slack) == {int(0.1 * budget.device_bytes)}


def test_a_step_that_just_fits_leaves_nothing_to_spare() -> None:
    step = replace(chain(1).ops[-1], phase=Phase.OPTIMIZER, workspace_bytes=0)
    trace = build_trace([FIXED, AGAIN] * 16)
    trace = replace(trace, ops=(*trace.ops, replace(step, reads=(), writes=())))
    mixer = Mixer(Case(trace, gpu(), Budget(1 << 30)), "mix/1")
    spared = mixer._spare(Wish(frozenset(), spare=0.5))
    assert spared[-1] == 0
    assert set(spared[:-1]) == {1 << 29}
