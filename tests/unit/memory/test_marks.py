"""Lives of blocks, of what an allocator was seen to hand out and take back."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from belady.memory.marks import Mark, Notes, lives_of
from belady.simulate.stretch import LEAST, SMALL, Event


@dataclass
class Listened:
    """What a ledger would note: each block has a number, and an address that may be used again."""

    events: list[Event] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def take(self, nbytes: int) -> int:
        block = len(self.addresses)
        self.addresses.append(self.free.pop() if self.free else 1000 + block)
        self.events.append((block, nbytes))
        return block

    def give_back(self, block: int) -> None:
        self.events.append((block, 0))
        self.free.append(self.addresses[block])

    def mark(self, mark: Mark) -> None:
        self.give_back(self.take(mark))

    def others(self, rng: random.Random) -> None:
        """Small blocks of another thread come and go."""
        for _ in range(rng.randrange(3)):
            self.give_back(self.take(SMALL // 2))


MIB = 1 << 20


def test_what_is_there_from_one_point_to_another() -> None:
    it = Listened()
    before = it.take(8 * MIB)
    it.mark(Mark.BEGIN)
    it.mark(Mark.POINT)
    first, small = it.take(2 * MIB + 1), it.take(SMALL)
    it.mark(Mark.POINT)
    second = it.take(3 * MIB)
    it.give_back(first)
    it.mark(Mark.POINT)
    it.give_back(second)
    result = it.take(4 * MIB)
    it.mark(Mark.END)
    loss = it.take(9 * MIB)
    given = it.take(5 * MIB)
    it.give_back(loss)
    it.mark(Mark.BEGIN)
    it.mark(Mark.POINT)
    it.give_back(given)
    gradient = it.take(6 * MIB)
    it.mark(Mark.END)
    for block in (before, small, result, gradient):
        it.give_back(block)
    notes = Notes(
        results=[it.addresses[result]], given=[(it.addresses[given], 5 * MIB), (7, 3 * MIB)]
    )
    assert [life[:3] for life in lives_of(it.events, it.addresses, notes)] == [
        (2 * MIB + LEAST, 1, 2),
        (3 * MIB, 2, 3),
        (4 * MIB, 3, 3),
        (5 * MIB, 4, 5),
        (3 * MIB, 4, 5),
        (6 * MIB, 5, 5),
    ]


@given(st.randoms(use_true_random=False), st.integers(1, 30))
def test_what_is_put_elsewhere_meanwhile_is_there(rng: random.Random, count: int) -> None:
    it, notes, expected = Listened(), Notes(), list[list[int]]()
    here, away = dict[int, int](), set[int]()  # block by value
    it.mark(Mark.BEGIN)
    for moment in range(1, count + 1):
        it.mark(Mark.POINT)
        gone = [value for value in away if rng.random() < 0.1]
        for value in gone:
            away.remove(value)
            notes.gone.append((value, moment))
            expected[value][2] = moment
        back = [value for value in away if rng.random() < 0.4]
        if back:
            it.mark(Mark.BACK)
            for value in back:
                away.remove(value)
                here[value] = it.take(expected[value][0])
            notes.back.append({it.addresses[here[value]]: value for value in back})
            it.others(rng)
            it.mark(Mark.OVER)
        leaving = [value for value in here if rng.random() < 0.3]
        if leaving:
            notes.away.append({it.addresses[here[value]]: value for value in leaving})
            it.mark(Mark.AWAY)
            it.others(rng)
            for value in leaving:
                it.give_back(here.pop(value))
                away.add(value)
            it.mark(Mark.OVER)
        for value in [value for value in here if rng.random() < 0.2]:
            it.give_back(here.pop(value))
            expected[value][2] = moment
        for _ in range(rng.randrange(3)):
            nbytes = rng.choice((2, 3, SMALL // MIB)) * MIB
            here[len(expected)] = it.take(nbytes)
            expected.append([nbytes, moment, count])
    it.mark(Mark.END)
    for block in here.values():
        it.give_back(block)
    large = [tuple(life) for life in expected if life[0] > SMALL]
    assert [life[:3] for life in lives_of(it.events, it.addresses, notes)] == large


def test_what_goes_at_its_own_moment_may_be_followed_there() -> None:
    it = Listened()
    it.mark(Mark.BEGIN)
    it.mark(Mark.POINT)
    temporary = it.take(2 * MIB)
    first = it.take(3 * MIB)
    it.give_back(temporary)
    second = it.take(4 * MIB)
    it.mark(Mark.POINT)
    it.mark(Mark.END)
    for block in (first, second):
        it.give_back(block)
    lives = lives_of(it.events, it.addresses, Notes())
    assert lives[0].gone == 2
    assert min(life.gone for life in lives[1:]) > 3


def test_where_marks_and_notes_do_not_agree_nothing_is_known() -> None:
    it = Listened()
    it.mark(Mark.BEGIN)
    it.mark(Mark.POINT)
    block = it.take(2 * MIB)
    # Another rehearsal's.
    it.mark(Mark.AWAY)
    it.mark(Mark.OVER)
    it.mark(Mark.END)
    it.give_back(block)
    assert lives_of(it.events, it.addresses, Notes()) == []
