"""Memory for a plan is divided once an iteration was seen that makes the allocator flush."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from belady.memory import cap, piece
from belady.memory.cap import WALL_BYTES, enforce
from belady.memory.piece import Piece
from belady.simulate.stretch import Event

MIB = 1 << 20
SOMEWHERE = torch.device("cuda", 0)
EVENTS = [(0, 96 * MIB), (1, 16 * MIB), (0, 0), (1, 0)]


class Heard:
    """What stands for a ledger: the iterations that it was asked to listen to."""

    def __init__(self, _device: torch.device) -> None:
        self.open, self.begun = False, 0

    def begin(self) -> None:
        self.open, self.begun = True, self.begun + 1

    def end(self) -> list[Event]:
        was, self.open = self.open, False
        return EVENTS if was else []

    def drop(self) -> None:
        self.open = False


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Holes of each time that memory is set aside."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(piece, "Ledger", Heard)
    monkeypatch.setattr(piece, "make_room", lambda _device, _bytes, holes: found.append(holes))
    monkeypatch.setattr(piece, "divisions", lambda events, wall, count: [(len(events), wall)])
    return found


@pytest.mark.parametrize("between", [[], [False], [False, False]])
def test_it_is_divided_at_the_second_flush(
    between: list[bool], made: list[tuple[int, ...]]
) -> None:
    it = Piece(SOMEWHERE, 400 * MIB)
    for flushed in (False, True, *between, True):
        it.went(flushed=flushed)
    assert made == [(), (), (len(EVENTS), WALL_BYTES)]
    assert it.holes == (len(EVENTS), WALL_BYTES)
    # One iteration was enough.
    assert isinstance(it._ledger, Heard)
    assert (it._ledger.begun, it._ledger.open) == (1, False)


def test_who_never_flushes_is_never_listened_to(made: list[tuple[int, ...]]) -> None:
    it = Piece(SOMEWHERE, 400 * MIB, (3,))
    it.went(flushed=False)
    assert isinstance(it._ledger, Heard)
    assert not it._ledger.begun
    assert made == [(3,)]
    it.clear()
    assert made == [(3,), (3,)]


def test_one_that_is_given_up_listens_no_more(made: list[tuple[int, ...]]) -> None:
    it = Piece(SOMEWHERE, 400 * MIB)
    it.went(flushed=True)
    it.close()
    it.went(flushed=True)
    assert made == [(), (), ()]


def test_far_below_the_budget_nothing_is_set_aside_anew(made: list[tuple[int, ...]]) -> None:
    Piece(SOMEWHERE, 0).clear()
    assert made == [()]


@pytest.fixture
def device() -> Iterator[torch.device]:
    # What tests before have left in cycles would go in between.
    gc.collect()
    torch.cuda.empty_cache()
    undo = enforce(SOMEWHERE, torch.cuda.memory_reserved(SOMEWHERE) + 400 * MIB)
    yield SOMEWHERE
    undo()


@pytest.mark.gpu
def test_walls_stand_until_no_budget_is_open(device: torch.device) -> None:
    # Workspaces of libraries that came before are given up.
    cap.make_room(device, 0)
    before = torch.cuda.memory_allocated(device)
    room = torch.cuda.memory_reserved(device) + 300 * MIB
    made = Piece(device, room, (64 * MIB, 32 * MIB))
    for _ in range(2):
        assert torch.cuda.memory_allocated(device) == before + 2 * WALL_BYTES
        small = torch.empty(32 * MIB, dtype=torch.uint8, device=device)
        large = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
        assert small.data_ptr() - large.data_ptr() == 64 * MIB + WALL_BYTES
        del small, large
        made.clear()
    cap.tear_down(device)
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.gpu
def test_the_end_of_a_budget_tears_walls_down() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(SOMEWHERE)
    room = torch.cuda.memory_reserved(SOMEWHERE) + 300 * MIB
    undo = enforce(SOMEWHERE, room + 100 * MIB)
    Piece(SOMEWHERE, room, (64 * MIB,))
    assert torch.cuda.memory_allocated(SOMEWHERE) > before
    undo()
    assert torch.cuda.memory_allocated(SOMEWHERE) == before
