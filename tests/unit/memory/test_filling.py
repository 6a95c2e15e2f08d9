"""Blocks of an allocator that knows best fit alone, where a packing has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from hypothesis import assume, given
from hypothesis import strategies as st

from belady.memory import filling as fillings
from belady.memory.cap import WALL_BYTES
from belady.memory.filling import Filling, Hole
from belady.simulate.coming import Life
from belady.simulate.packing import Packing, packed
from belady.simulate.stretch import Stretch
from tests.unit.simulate.test_packing import mixed

MIB = 1 << 20


class _Block:
    """A block that is given back when it is dropped."""

    def __init__(self, give_back: Callable[[], None]) -> None:
        self._give_back = give_back

    def __del__(self) -> None:
        self._give_back()


class OneStretch:
    """`belady.memory.filling.Memory`: so many bytes in one piece, behind a block of others."""

    def __init__(self, nbytes: int, before: int = 0) -> None:
        self.taken = self.given_back = 0
        self.stretch = Stretch()
        self._lasting = self.stretch.take(before) if before else 0
        self.stretch.free(self.stretch.take(nbytes))

    def holes(self) -> list[Hole]:
        end = self.stretch.end
        found = self.stretch._holes.items()
        return [Hole(at + size == end, size, at) for at, size in found if size > fillings.SMALL]

    def take(self, nbytes: int) -> tuple[int, object]:
        self.taken += 1
        at = self.stretch.take(nbytes)
        return at, _Block(lambda: self.free(at))

    def free(self, at: int) -> None:
        self.given_back += 1
        self.stretch.free(at)

    def counts(self) -> tuple[int, int]:
        return self.taken, self.given_back


def carried_out(memory: OneStretch, filling: Filling, packing: Packing) -> list[int]:
    """Addresses of the blocks as they come and go, with a point before each moment."""
    filling.open()
    found, held = list[int](), dict[int, Any]()
    for number, life in enumerate(packing.lives):
        first = number == 0 or packing.lives[number - 1].first < life.first
        if first:
            for before in [it for it in held if packing.lives[it].last < life.first]:
                del held[before]
            filling.point()
        for before in [it for it in held if packing.lives[it].gone <= number]:
            del held[before]
        at, held[number] = memory.take(life.nbytes)
        found.append(at)
    filling.close()
    return found


@given(st.randoms(use_true_random=False), st.integers(1, 25), st.sampled_from((0, 5 * MIB)))
def test_blocks_lie_where_they_are_to(rng: random.Random, count: int, before: int) -> None:
    lives = mixed(rng, count)
    packing = packed(lives, MIB, 0.0)
    memory = OneStretch(packing.end + WALL_BYTES, before)
    filling = Filling(memory, packing)
    found = carried_out(memory, filling, packing)
    hangs = packing.end > max(
        at + it.nbytes for at, it in zip(packing.addresses, lives, strict=True)
    )
    # What is packed at once may hang.
    assume(not hangs)
    assert [at - before for at in found] == list(packing.addresses)
    assert filling.missed == []
    assert memory.stretch.end == before + packing.end + WALL_BYTES


def test_those_that_come_alone_do_whatever_lies_below_them() -> None:
    # Many are hardly larger than others: what lies between them cannot be filled.
    rng = random.Random(0)
    sizes = [rng.choice((4, 5, 7, 16, 33)) * MIB // 2 for _ in range(200)]
    lives = [Life(it, at, at + rng.randrange(8)) for at, it in enumerate(sizes)]
    packing = packed(lives, MIB, 0.0)
    memory = OneStretch(packing.end + WALL_BYTES)
    assert carried_out(memory, Filling(memory, packing), packing) == list(packing.addresses)


def test_without_it_they_do_not() -> None:
    lives = [Life(96 * MIB, 0, 2), Life(16 * MIB, 1, 9), Life(96 * MIB, 2, 2)]
    lives += [Life(16 * MIB, 3, 9), Life(192 * MIB, 4, 9)]
    packing = packed(lives, MIB, 1.0)
    memory = OneStretch(packing.end)
    assert carried_out(memory, Filling(memory, packing), packing) == list(packing.addresses)
    assert memory.stretch.end == packing.end
    bare = OneStretch(packing.end)
    empty = Filling(bare, Packing((), (), 0))
    assert carried_out(bare, empty, packing) != list(packing.addresses)
    assert bare.stretch.end > packing.end


def test_what_is_not_foretold_takes_what_is_left() -> None:
    lives = [Life(16 * MIB, 0, 3), Life(32 * MIB, 2, 3)]
    packing = packed(lives, MIB, 1.0)
    memory = OneStretch(packing.end + 64 * MIB)
    filling = Filling(memory, packing)
    filling.open()
    first = memory.take(lives[0].nbytes)
    filling.point()
    # The second is expected next, and what comes has another size.
    other = memory.take(5 * MIB)
    filling.point()
    assert first[0] == packing.addresses[0]
    # It lies in what is kept for that one, which is smaller then than what comes.
    assert other[0] in {packing.addresses[1], packing.end}
    filling.close()
    assert sum(size for _, size, _ in memory.holes()) == packing.end + (64 - 16 - 5) * MIB


def test_a_place_that_is_taken_is_missed() -> None:
    lives = [Life(16 * MIB, 0, 3), Life(32 * MIB, 1, 3)]
    memory = OneStretch(64 * MIB)
    filling = Filling(memory, Packing(lives, (0, 16 * MIB), 48 * MIB))
    filling.open()
    # Smaller than what its place was left for: the rest of that is no place for the next one.
    taken = [memory.take(16 * MIB)]
    blocker = memory.take(20 * MIB)
    memory.taken -= 1
    filling.point()
    other = memory.take(32 * MIB)
    filling.point()
    assert filling.missed == [1]
    filling.close()
    del taken, blocker, other


def test_nothing_is_filled_where_there_is_no_hole() -> None:
    memory = OneStretch(16 * MIB)
    whole = memory.take(16 * MIB)
    filling = Filling(memory, Packing([Life(4 * MIB, 0, 0)], (0,), 4 * MIB))
    filling.open()
    grown = memory.take(4 * MIB)
    filling.point()
    assert grown[0] == 16 * MIB
    assert filling.missed == [0]
    filling.close()
    del whole, grown


def test_what_is_closed_fills_nothing() -> None:
    memory = OneStretch(64 * MIB)
    filling = Filling(memory, Packing([Life(4 * MIB, 0, 0)], (8 * MIB,), 12 * MIB))
    filling.point()
    assert memory.taken == 0
    filling.open()
    assert memory.take(4 * MIB)[0] == 8 * MIB
    filling.close()
    taken = memory.taken
    filling.point()
    assert memory.taken == taken
    assert sum(size for _, size, _ in memory.holes()) == 64 * MIB
