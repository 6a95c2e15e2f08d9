"""Blocks whose lives are known, packed."""

from __future__ import annotations

import random
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from belady.simulate.coming import Life
from belady.simulate.packing import Packing, held_bytes, packed
from belady.simulate.stretch import end_of

MIB = 1 << 20
# No time: the orders that it begins with alone.
AT_ONCE, SOON = 0.0, 1.0


def mixed(rng: random.Random, count: int) -> list[Life]:
    """Blocks that come one at a moment or two, and go some moments later, or before the next."""
    lives, moment = list[Life](), 0
    for number in range(count):
        moment += rng.random() < 0.7
        life = Life(rng.choice((3, 16, 17, 48, 96)) * MIB, moment, moment + rng.randrange(12))
        brief = life.last == moment and rng.random() < 0.7
        lives.append(life._replace(gone=number + rng.randint(1, 2)) if brief else life)
    return lives


def clash(packing: Packing) -> list[tuple[int, int]]:
    """Pairs of blocks that are there at once, at one address."""
    blocks = enumerate(zip(packing.lives, packing.addresses, strict=True))
    return [
        (n, m)
        for (n, (a, x)), (m, (b, y)) in combinations(blocks, 2)
        if a.first <= b.last and b.first <= a.last and m < a.gone and n < b.gone
        if x < y + b.nbytes and y < x + a.nbytes
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


def deep(blocks: int) -> list[Life]:
    """Forward and backward of blocks whose ops each make two values, and take scratch meanwhile.

    Of one size, so that the lowest hole would be used first, whosever it is.
    """
    lives, last = list[Life](), 4 * blocks
    for at in range(blocks):
        lives.append(Life(6 * MIB, 2 * at, last - 2 * at))
        lives.append(Life(6 * MIB, 2 * at, 2 * at, len(lives) + 1))
        lives.append(Life(6 * MIB, 2 * at, 2 * at + 1))
        lives.append(Life(24 * MIB, 2 * at + 1, 2 * at + 1))
    return lives


def test_what_comes_at_once_lies_where_it_would_come_to_lie() -> None:
    lives = deep(100)
    packing = packed(lives, MIB, 4 * SOON)
    assert not clash(packing)
    # What does not counts twice.
    assert packing.end <= 1.01 * held_bytes(lives)


def branching(rng: random.Random, ops: int) -> list[Life]:
    """The same, of values that stay for longer or less."""
    lives, last = list[Life](), 4 * ops
    for at in range(0, 2 * ops, 2):
        ends = [rng.choice((at, at + 1, at + 5, last - at)) for _ in range(3)]
        lives += [Life(6 * MIB, at, end) for end in ends]
        lives.append(Life(24 * MIB, at + 1, at + 1))
    return lives


def test_what_would_not_is_placed_with_all_that_comes_with_it() -> None:
    lives = branching(random.Random(0), 300)
    assert packed(lives, MIB, AT_ONCE).end > 1.3 * held_bytes(lives)
    packing = packed(lives, MIB, 20 * SOON)
    assert not clash(packing)
    assert packing.end <= 1.005 * held_bytes(lives)


def test_the_most_that_is_there_at_one_moment() -> None:
    assert held_bytes([]) == 0
    lives = [Life(2, 0, 1), Life(3, 1, 2), Life(4, 2, 2)]
    assert held_bytes(lives) == 7
    # The last one comes when the one before it is gone.
    assert held_bytes([*lives[:2], Life(4, 2, 2, gone=3), Life(5, 2, 2)]) == 8
