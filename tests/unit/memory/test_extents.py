"""Extents never overlap, all come back, and nobody loses a fence."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from belady.ir.timeline import Lane
from belady.memory.extents import PAGE, Extents, Range, latest, round_up
from belady.memory.fences import Fence

TOTAL = 64


class Model(RuleBasedStateMachine):
    """Against a list that says, page by page, which fences a taker must see."""

    taken = Bundle("taken")

    def __init__(self) -> None:
        super().__init__()
        self.extents = Extents()
        self.extents.give(0, TOTAL * PAGE)
        self.free: dict[int, int] = dict.fromkeys(range(TOTAL), -1)
        self.order = 0

    def claim(self, part: Range) -> Range:
        pages = range(part.start // PAGE, part.end // PAGE)
        newest = max(self.free.pop(page) for page in pages)  # KeyError: an overlap
        seen = max((fence.order for fence in part.fences), default=-1)
        assert seen >= newest
        return part

    @rule(target=taken, pages=st.integers(1, 20))
    def take(self, pages: int) -> list[Range]:
        part = self.extents.take(pages * PAGE)
        if part is None:
            assert all(it.nbytes < pages * PAGE for it in self.extents.ranges())
            return []
        assert part.nbytes == pages * PAGE
        return [self.claim(part)]

    @rule(target=taken, pages=st.integers(1, TOTAL))
    def gather(self, pages: int) -> list[Range]:
        parts = self.extents.gather(pages * PAGE)
        if parts is None:
            assert len(self.free) < pages
            return []
        assert sum(part.nbytes for part in parts) == pages * PAGE
        return [self.claim(part) for part in parts]

    @rule(parts=consumes(taken), fenced=st.booleans())
    def give(self, parts: list[Range], fenced: bool) -> None:
        for part in parts:
            self.order += 1
            mine = (Fence(Lane.COPY_IN, self.order),) if fenced else ()
            self.extents.give(part.start, part.nbytes, mine)
            pages = range(part.start // PAGE, part.end // PAGE)
            self.free.update(dict.fromkeys(pages, self.order if fenced else -1))

    @invariant()
    def agree(self) -> None:
        ranges = self.extents.ranges()
        pages = {page for it in ranges for page in range(it.start // PAGE, it.end // PAGE)}
        assert pages == set(self.free)
        assert self.extents.free_bytes == len(self.free) * PAGE
        assert all(a.end < b.start for a, b in pairwise(ranges))
        assert all(len(it.fences) <= 1 for it in ranges)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=40, stateful_step_count=40)


def test_best_fit_takes_the_smallest_hole() -> None:
    extents = Extents()
    extents.give(0, 8 * PAGE)
    extents.give(10 * PAGE, 3 * PAGE)
    extents.give(20 * PAGE, 4 * PAGE)
    assert extents.best(3 * PAGE) == 3 * PAGE
    taken = extents.take(3 * PAGE)
    assert taken == Range(10 * PAGE, 3 * PAGE)


@pytest.mark.parametrize("start", [0, PAGE, 3 * PAGE])
def test_giving_twice_is_refused(start: int) -> None:
    extents = Extents()
    extents.give(PAGE, 3 * PAGE)
    with pytest.raises(ValueError, match="free already"):
        extents.give(start, 2 * PAGE)
    assert extents.free_bytes == 3 * PAGE


@pytest.mark.parametrize(("start", "nbytes"), [(1, PAGE), (0, 1), (0, 0), (-PAGE, PAGE)])
def test_only_whole_pages(start: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        Extents().give(start, nbytes)


def test_latest_keeps_one_fence_a_lane() -> None:
    out, old, new = Fence(Lane.COPY_OUT, 7), Fence(Lane.COPY_IN, 3), Fence(Lane.COPY_IN, 9)
    assert set(latest([new, out, old])) == {out, new}


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_round_up(nbytes: int, rounded: int) -> None:
    assert round_up(nbytes) == rounded
