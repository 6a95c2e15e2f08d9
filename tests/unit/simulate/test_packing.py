"""Blocks whose lives are known, packed."""

from __future__ import annotations

import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from belady.simulate.packing import Life, Packing, held_bytes, packed
from belady.simulate.stretch import end_of

MIB = 1 << 20
# No time: the orders that it begins with alone.
AT_ONCE, SOON = 0.0, 1.0


def mixed(rng: random.Random, count: int) -> list[Life]:
    """Blocks that come one at a moment or two, and go some moments later."""
    lives, moment = list[Life](), 0
    for _ in range(count):
        moment += rng.random() < 0.7
        nbytes = rng.choice((3, 16, 17, 48, 96)) * MIB
        lives.append(Life(nbytes, moment, moment + rng.randrange(12)))
    return lives


def clash(packing: Packing) -> list[tuple[int, int]]:
    """Pairs of blocks that are there at one moment, at one address."""
    blocks = enumerate(zip(packing.lives, packing.addresses, strict=True))
    return [
        (n, m)
        for (n, (a, x)), (m, (b, y)) in combinations(blocks, 2)
        if a.first <= b.last and b.first <= a.last and x < y + b.nbytes and y < x + a.nbytes
    ]


@given(st.randoms(use_true_random=False), st.integers(0, 40))
def test_no_two_blocks_lie_on_one_another(rng: random.Random, count: int) -> None:
    packing = packed(mixed(rng, count), MIB, AT_ONCE)
    assert not clash(packing)
    ends = [x + it.nbytes for it, x in zip(packing.lives, packing.addresses, strict=True)]
    assert packing.end >= max(ends, default=0) >= held_bytes(packing.lives)
    assert packed(packing.lives, MIB, AT_ONCE) == packing


def test_nothing_is_lost_where_best_fit_loses() -> None:
    # Two that stay come between two that go: what those leave is too small for one that follows.
    lives = [Life(96 * MIB, 0, 2), Life(16 * MIB, 1, 9), Life(96 * MIB, 2, 2)]
    lives += [Life(16 * MIB, 3, 9), Life(192 * MIB, 4, 9)]
    events = [(0, 96 * MIB), (1, 16 * MIB), (2, 96 * MIB), (0, 0), (2, 0)]
    events += [(3, 16 * MIB), (4, 192 * MIB), (1, 0), (3, 0), (4, 0)]
    assert end_of(events, MIB) > held_bytes(lives) == 224 * MIB
    packing = packed(lives, MIB, SOON)
    assert packing.end == 224 * MIB
    assert not clash(packing)


def test_what_lies_below_a_block_can_be_filled() -> None:
    # The second would lie half a MiB above the first, on what comes later: no block fills that.
    lives = [Life(8 * MIB, 0, 1), Life(2 * MIB, 1, 9), Life(8 * MIB + MIB // 2, 2, 9)]
    packing = packed(lives, MIB, SOON)
    low, high = packing.addresses[:2]
    assert not (low < high and 0 < high - (low + lives[0].nbytes) <= MIB)


def test_of_two_that_come_at_once_the_first_lies_below() -> None:
    lives = [Life(3 * MIB, 0, 9), Life(96 * MIB, 0, 9)]
    first, second = packed(lives, MIB, SOON).addresses
    assert first + lives[0].nbytes == second


def test_the_most_that_is_there_at_one_moment() -> None:
    assert held_bytes([]) == 0
    lives = [Life(2, 0, 1), Life(3, 1, 2), Life(4, 2, 2)]
    assert held_bytes(lives) == 7
