"""Walls that a piece of memory begins with, and what they save."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from belady.simulate.blocks import Blocks
from belady.simulate.holes import divisions, told
from belady.simulate.stretch import Event, end_of

MIB = 1 << 20
WALL = 2 * MIB
DATA = Path(__file__).with_name("resnet50.json")


def mixed(rng: random.Random, count: int) -> list[Event]:
    """Blocks of three sizes that come and go in any order, and are all gone at the end."""
    events, living = list[Event](), list[int]()
    for block in range(count):
        while living and rng.random() < 0.5:
            events.append((living.pop(rng.randrange(len(living))), 0))
        events.append((block, rng.choice((16, 48, 96)) * MIB))
        living.append(block)
    return [*events, *((block, 0) for block in living)]


def test_a_wall_keeps_small_blocks_from_what_large_ones_need() -> None:
    # Two small blocks among large ones would leave holes of 96 MiB for 112.
    events = [(0, 96 * MIB), (1, 16 * MIB), (2, 96 * MIB), (3, 16 * MIB)]
    events += [(0, 0), (2, 0), (4, 112 * MIB), (5, 112 * MIB)]
    events += [(block, 0) for block in (1, 3, 4, 5)]
    whole = end_of(events, MIB)
    assert whole == (96 + 16 + 96 + 16 + 112 + 112) * MIB
    assert end_of(events, MIB, (32 * MIB,), WALL) == 32 * MIB + WALL + 2 * 112 * MIB
    best, *others = divisions(events, WALL, 5)
    assert end_of(events, MIB, best, WALL) <= 32 * MIB + WALL + 2 * 112 * MIB
    assert len(others) == 4


@given(st.randoms(use_true_random=False), st.integers(1, 60))
def test_the_best_come_first_and_none_is_worse_than_no_wall_at_all(
    rng: random.Random, count: int
) -> None:
    events = mixed(rng, count)
    found = divisions(events, WALL, 8)
    ends = [end_of(events, MIB, holes, WALL) for holes in found]
    assert ends == sorted(ends)
    assert ends[0] <= end_of(events, MIB)
    assert ends[0] >= Blocks(0, events).held_bytes()
    assert len({*found}) == len(found) <= 8
    assert divisions(events, WALL, 8) == found


@given(st.randoms(use_true_random=False), st.lists(st.sampled_from((16, 48, 96)), max_size=3))
def test_walls_stay_where_they_are(rng: random.Random, sizes: list[int]) -> None:
    """What ends after many iterations is what ends after one."""
    events, holes = mixed(rng, 20), [it * MIB for it in sizes]
    assert end_of(3 * events, MIB, holes, WALL) == end_of(events, MIB, holes, WALL)


def test_small_blocks_alone_need_no_walls() -> None:
    assert divisions([(0, MIB), (0, 0)], WALL, 4) == [()]
    assert divisions([], WALL, 4) == [()]


def test_a_wall_saves_an_iteration_of_resnet50_what_lies_lost_between_its_blocks() -> None:
    """As torch's allocator told it on an H200: b256, bf16, Inductor's kernels, within 3 GiB."""
    events = [tuple(it) for it in json.loads(DATA.read_text())]
    held, whole = Blocks(0, events).held_bytes(), end_of(events, MIB)
    (best,) = divisions(events, WALL, 1)
    divided = end_of(events, MIB, best, WALL)
    assert [it // MIB for it in (held, whole, divided)] == [2205, 2450, 2261]


def test_a_log_says_what_a_piece_begins_with() -> None:
    assert told((48 * MIB, 3 * MIB)) == "48.00 MiB and 3.00 MiB and the rest"
    assert told(()) == "the rest"
