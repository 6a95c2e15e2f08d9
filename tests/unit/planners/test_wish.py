"""Neighbours of a mix: a few values are turned, those next to one another or one of each block."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from itertools import pairwise, zip_longest

import pytest

from belady.planners.wish import Neighbours, Wish, with_limit
from tests.support.builder import OpSpec, build_trace

MIB = 2**20
# Four blocks of a large and two small values, which another op makes in the last.
LARGE, SMALL = OpSpec(nbytes=4 * MIB, saves_output=True), OpSpec(nbytes=MIB, saves_output=True)
BLOCKS = build_trace([LARGE, SMALL, SMALL] * 4)
NAMES = [*["aten.relu.default", *["aten.tanh.default"] * 2] * 3, "aten.relu.default"]
OPS = zip_longest(BLOCKS.ops, NAMES, fillvalue="aten.sigmoid.default")
TRACE = replace(BLOCKS, ops=tuple(replace(op, name=name) for op, name in OPS))
VALUES = sorted(TRACE.saved, key=lambda v: TRACE.values[v].first_save)
LIMITS = {"reach": (0.0, 16.0), "early": (0.0, 64.0)}
AT = Wish(frozenset(VALUES[::2]))


def turned(seed: int) -> list[int]:
    """Places in time of what one neighbour has turned; empty where it has another limit."""
    other = Neighbours(TRACE, VALUES, LIMITS).one(random.Random(seed), AT)
    return [VALUES.index(value) for value in sorted(other.values ^ AT.values, key=VALUES.index)]


def kind(place: int) -> tuple[str, int]:
    value = TRACE.values[VALUES[place]]
    return TRACE.ops[value.producer].name, TRACE.storages[value.storage].nbytes


def in_a_row(places: list[int], among: list[int]) -> bool:
    """Whether these are neighbours in ``among``, but for those that were as the first becomes."""
    first, last = among.index(places[0]), among.index(places[-1])
    between = among[first : last + 1]
    goes = VALUES[places[0]] in AT.values
    return places == [it for it in between if (VALUES[it] in AT.values) is goes]


@pytest.mark.parametrize("seed", range(60))
def test_values_are_turned_that_are_next_in_time_or_alike(seed: int) -> None:
    places = turned(seed)
    if not places:
        return
    alike = [place for place in range(len(VALUES)) if kind(place) == kind(places[0])]
    # All become as the first of those that were drawn, which may have been so already.
    assert len({VALUES[place] in AT.values for place in places}) == 1
    assert in_a_row(places, [*range(len(VALUES))]) or in_a_row(places, alike)


def test_all_ways_to_turn_come_about() -> None:
    found = [turned(seed) for seed in range(400)]
    spread = [it for it in found if len(it) > 2 and len({kind(place) for place in it}) == 1]
    # Of each block one, and several in a row of one block and the next.
    assert any(max(b - a for a, b in pairwise(it)) > 2 for it in spread)
    assert any(len({kind(place) for place in it}) > 1 for it in found)
    assert any(len(it) == 1 for it in found)
    assert {place for it in found for place in it} == set(range(len(VALUES)))


def test_otherwise_one_limit_is_changed() -> None:
    neighbours, rng = Neighbours(TRACE, VALUES, LIMITS), random.Random(0)
    found = [neighbours.one(rng, AT) for _ in range(300)]
    others = [it for it in found if it.values == AT.values]
    named = {it.name for it in fields(Wish)} - {"values"}
    for other in others:
        changed = [name for name in named if getattr(other, name) != getattr(AT, name)]
        assert len(changed) <= 1
        assert set(changed) <= LIMITS.keys()
    assert {(it.reach, it.early) for it in others} == {(0.0, 0.0), (16.0, 0.0), (0.0, 64.0)}
    assert 0.1 < len(others) / len(found) < 0.3


def test_a_seed_says_what_comes() -> None:
    assert [turned(seed) for seed in range(20)] == [turned(seed) for seed in range(20)]


def test_a_limit_is_all_that_differs() -> None:
    assert with_limit(AT, "early", 64.0) == Wish(AT.values, early=64.0)
