"""Mixes that make whole segments again, and replays that are given up where they do not fit."""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from belady.ir.plan import Budget, Recompute
from belady.ir.trace import Trace
from belady.planners import plan
from belady.planners.due import timed
from belady.planners.mix import Mixer
from belady.planners.moves import Case, movable
from belady.planners.repairs import bulky, heavy, light, worst
from belady.planners.segments import bottlenecks, segmented
from belady.planners.spread import held_bytes
from belady.planners.wish import Wish
from belady.simulate import bound
from tests.support.builder import OpSpec, build_trace
from tests.unit.planners.nets import gpu
from tests.unit.planners.test_hybrid import MB, PLENTY, budgets

SMALL = OpSpec(nbytes=25 * MB, device_us=150, saves_output=True, replayable=True)
LARGE = OpSpec(nbytes=100 * MB, device_us=150, saves_output=True, replayable=True)


def written(trace: Trace, op: int) -> int:
    return trace.ops[op].writes[0]


def test_a_bottleneck_is_all_that_later_ops_need() -> None:
    # Op 2 reads what op 0 wrote, and the branch past it is read by op 3.
    plain = OpSpec(nbytes=8192, saves_output=True)
    specs = [plain, plain, OpSpec(nbytes=8192, branch=1), OpSpec(nbytes=8192, join=True), plain]
    trace = build_trace(specs)
    found = bottlenecks(trace)
    reads = [set(op.reads) for op in trace.ops[:5]]
    for op in range(5):
        made_before = {v for before in range(op + 1) for v in trace.ops[before].writes}
        needed = made_before & set().union(*reads[op + 1 :])
        assert (written(trace, op) in found) == (needed == {written(trace, op)}), op
    assert any(written(trace, op) not in found for op in range(4))


def test_segments_begin_at_bottlenecks_and_become_shorter() -> None:
    trace, hardware = build_trace([SMALL, SMALL, SMALL, LARGE] * 16), gpu()
    case = Case(trace, hardware, PLENTY)
    nbytes = {value: held_bytes(case, value) for value in movable(trace)}
    mixes = [*segmented(trace, nbytes, nbytes.keys())]
    begins = [set(nbytes) - mix for mix in mixes]
    assert all(it <= bottlenecks(trace) for it in begins)
    assert len(begins) > 3
    counts = [len(it) for it in begins]
    assert counts == sorted(set(counts))
    assert counts[0] in (3, 4)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.2])
def test_with_little_memory_segments_are_made_again_and_time_stays_near_the_bound(
    share: float,
) -> None:
    """Short replays and copies alone take up to twice as long."""
    trace = build_trace([SMALL, SMALL, SMALL, SMALL, LARGE] * 12)
    hardware = gpu(link_rate=2e10)
    (budget,) = budgets(trace, hardware, share)
    made = plan("hybrid", trace, hardware, budget)
    assert made.predicted_seconds < 1.04 * bound(trace, hardware, budget).seconds


def test_the_worst_op_of_each_stretch_without_room() -> None:
    assert worst(np.array([1, -1, -3, -2, 0, 5, -4, 1, -1])) == [2, 6, 8]
    assert worst(np.array([0, 1])) == []


class Row:
    """Values in a row, each of which is made again from the one before, for the last one's read."""

    def __init__(self) -> None:
        self.trace = build_trace([SMALL, LARGE, SMALL, SMALL, LARGE, SMALL])
        self.case = Case(self.trace, gpu(), PLENTY)
        self.values = [written(self.trace, op) for op in range(6)]
        self.reads = [self.trace.values[value].first_read or 0 for value in self.values]
        every = {self.values[op]: Recompute((op,), self.reads[op]) for op in range(1, 5)}
        self.replays = timed(self.trace, every)
        self.copied = self.values[:1]

    def light(self, lacking: int, at: int, replays: dict[int, Recompute] | None = None) -> set[int]:
        replays = self.replays if replays is None else replays
        return light(self.case, replays, self.copied, at, lacking)


def test_of_a_row_of_replays_a_small_one_is_given_up_that_lets_enough_before_it_wait() -> None:
    row = Row()
    at = row.reads[4]
    assert {it.at for it in row.replays.values()} == {at}
    # What is before the third are 125 MB, and 25 MB more before the fourth.
    for lacking in (1, 125 * MB):
        assert row.light(lacking, at) == {row.values[2]}
    for lacking in (126 * MB, 150 * MB):
        assert row.light(lacking, at) == {row.values[3]}
    assert row.light(151 * MB, at) == {row.values[3], row.values[4]}
    assert row.light(2**40, at) == {row.values[3], row.values[4]}


def test_a_replay_is_given_up_for_what_it_makes_beside_or_keeps_from_being_away() -> None:
    row = Row()
    long = {row.values[3]: Recompute((1, 2, 3), row.reads[3])}
    assert row.light(1, row.reads[3], long) == {row.values[3]}
    # What it started from is back early, until it is read itself.
    assert row.light(1, row.reads[1], long) == {row.values[3]}
    assert row.light(1, row.reads[0], long) == set()
    assert row.light(1, row.reads[3] - 1, long) == set()
    assert row.light(1, row.reads[3], {}) == set()


def test_replays_that_start_from_one_value_are_given_up_together() -> None:
    row = Row()
    first, third, fourth = row.values[0], row.values[3], row.values[4]
    both = {
        third: Recompute((1, 2, 3), row.reads[3]),
        fourth: Recompute((1, 2, 3, 4), row.reads[4]),
    }
    at = row.reads[1]
    assert row.reads[4] < row.reads[3] <= at < row.reads[0]
    assert row.trace.ops[1].reads[0] == first
    # Each alone leaves the other, which has it back as early.
    assert row.light(1, at, both) == {third, fourth}
    assert row.light(2**40, at, both) == {third, fourth}
    # Before the other one runs, the fourth alone is in the way.
    assert row.light(1, row.reads[4], both) == {fourth}


def test_what_can_be_encoded_is_not_copied_where_its_replay_takes_too_much() -> None:
    """A mask: a bit an element does where its replay does not fit."""
    specs = [LARGE, replace(LARGE, mask=True)] * 8
    trace = build_trace(specs)
    case = Case(trace, gpu(), PLENTY)
    mixer = Mixer(case, "mix/0")
    encoded = frozenset(mixer.ways.encodings)
    assert encoded
    wish = mixer._without(Wish(frozenset(mixer.ways.cost)), encoded)
    away = mixer.away(wish)
    assert away.encoded.keys() == encoded
    assert not encoded & {*away.moves, *away.replays}
    copied = mixer.away(mixer._without(replace(wish, encodes=False), encoded))
    assert encoded <= copied.moves.keys()


def test_encodings_that_leave_too_much_are_given_up_too() -> None:
    """What is left of 60 masks, 12.5 MB of each, is there at the turn from forward to backward."""
    trace = build_trace([replace(LARGE, mask=True)] * 60)
    room = Case(trace, gpu(), PLENTY)
    wish = Wish(frozenset(Mixer(room, "mix/0").ways.encodings), stretch=0.0)
    floor = int(Mixer(room, "mix/0")._slack(Mixer(room, "mix/0").away(Wish(frozenset()))).min())
    least = PLENTY.device_bytes - floor
    for more, kept in ((750 * MB, 59), (375 * MB, 29), (0, 0)):
        case = Case(trace, gpu(), Budget(least + more))
        mixer = Mixer(case, "mix/0")
        fitting = mixer._begin(wish)
        assert fitting is not None
        assert fitting.slack.min() >= 0
        assert abs(len(fitting.away.encoded) - kept) < 4


def test_what_goes_from_encodings_is_most_of_what_is_left() -> None:
    trace = build_trace([replace(LARGE, mask=True)] * 4)
    ways = Mixer(Case(trace, gpu(), PLENTY), "mix/0").ways
    encoded = ways.encodings
    first, *_, last = sorted(encoded, key=lambda v: trace.values[v].first_save)
    at = encoded[last].encode_at
    # The same bytes are left of all, but those are the most of the fewest.
    ways.nbytes[last] //= 2
    ways.saved[last] -= ways.nbytes[last]
    assert bulky(trace, encoded, ways, at, 1) == {last}
    assert bulky(trace, encoded, ways, at, 2**40) == {*encoded}
    assert bulky(trace, encoded, ways, encoded[first].encode_at, 2**40) == {first}
    assert bulky(trace, {}, ways, at, 1) == set()


def test_the_heaviest_replays_are_those_whose_end_helps_most() -> None:
    trace, hardware = build_trace([SMALL, LARGE, SMALL, SMALL, LARGE, SMALL]), gpu()
    case = Case(trace, hardware, PLENTY)
    values = [written(trace, op) for op in range(6)]
    firsts = [trace.values[value].first_read or 0 for value in values]
    light = Recompute((3,), firsts[3])
    long = Recompute((1, 2), firsts[2])
    replays = {values[3]: light, values[2]: long}
    assert heavy(case, replays, (), firsts[2], 1) == {values[2]}
    # What another starts from is back early on its account, until it is read itself.
    gone = {values[2]: firsts[2], values[0]: firsts[0]}
    assert heavy(case, replays, gone, firsts[3], 1) == {values[3]}
    assert heavy(case, replays, gone, firsts[2] + 1, 1) == {values[2]}
    assert heavy(case, {}, gone, firsts[3], 1) == set()
    # As many as take what is lacking, and no more of them.
    both = {values[3]: light, values[4]: Recompute((1, 2, 3, 4), firsts[4])}
    assert len(heavy(case, both, gone, firsts[3], 1)) == 1
    assert heavy(case, both, gone, firsts[3], 2**40) == {*both}


@pytest.mark.parametrize("reach", [32.0, inf])
def test_a_row_longer_than_repairs_are_many_has_a_mix_in_time(reach: float) -> None:
    # Room for six of 900 values: one by one more are to be given up than there are repairs, and to
    # weigh all of those that come early takes 50 times as long.
    case = Case(build_trace([SMALL] * 900), gpu(), Budget(6 * 25 * MB))
    mixer = Mixer(case, "mix/0")
    begun = time.process_time()
    assert mixer._begin(Wish(frozenset(mixer.ways.cost), reach=reach)) is not None
    assert time.process_time() - begun < 3


def test_segments_begin_at_the_smallest_value_of_the_last_half_of_a_part() -> None:
    trace = build_trace([SMALL, LARGE, LARGE, LARGE] * 16)
    case = Case(trace, gpu(), PLENTY)
    nbytes = {value: held_bytes(case, value) for value in movable(trace)}
    coarse = next(segmented(trace, nbytes, nbytes.keys()))
    assert {nbytes[value] for value in set(nbytes) - coarse} == {25 * MB}
