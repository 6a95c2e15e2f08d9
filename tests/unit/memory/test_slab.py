"""The host arena: exact budgets, slabs that come and go, fences that are passed on."""

from __future__ import annotations

import gc
import mmap
import threading
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from belady.errors import TierFullError
from belady.ir.timeline import Lane
from belady.memory.extents import PAGE, round_up
from belady.memory.fences import Fence
from belady.memory.pages import Pages
from belady.memory.slab import SMALLEST_SLAB, HostArena

MIB = 2**20


class CountingPages(Pages):
    """Pages that note what is pinned; the ``fail_at``-th map or pin fails."""

    def __init__(self, fail_at: int = 0) -> None:
        self.fail_at = fail_at
        self.calls = 0
        self.pinned: set[int] = set()

    def _call(self) -> bool:
        self.calls += 1
        return self.calls == self.fail_at

    def map(self, nbytes: int) -> mmap.mmap:
        if self._call():
            raise OSError(12, "Cannot allocate memory")
        return super().map(nbytes)

    def pin(self, address: int, nbytes: int) -> None:
        if self._call():
            raise TierFullError("CUDA could not pin")
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


@dataclass(eq=False)
class Gate(Fence):
    passed: threading.Event

    def synchronize(self) -> None:
        self.passed.set()


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * MIB])
def test_block_is_exact_and_aligned(nbytes: int) -> None:
    arena = HostArena(None, pin=False)
    block = arena.alloc(nbytes)
    assert block.tensor.shape == (nbytes,)
    assert block.tensor.dtype is torch.uint8
    assert block.tensor.data_ptr() % PAGE == 0
    assert arena.used_bytes == round_up(nbytes)
    block.tensor.fill_(7)
    arena.free(block)
    arena.free(block)
    assert arena.used_bytes == 0
    assert arena.peak_bytes == round_up(nbytes)


def test_empty_block_takes_nothing() -> None:
    arena = HostArena(0, pin=False)
    block = arena.alloc(0)
    arena.free(block)
    assert (block.tensor.numel(), arena.slab_bytes, arena.used_bytes) == (0, 0, 0)


def test_budget_is_exact() -> None:
    arena = HostArena(3 * PAGE, pin=False)
    first = arena.alloc(PAGE)
    second = arena.alloc(2 * PAGE)
    with pytest.raises(TierFullError, match="budget is 12288 bytes, of which 12288 are used"):
        arena.alloc(1)
    arena.free(first)
    arena.free(second)
    whole = arena.alloc(3 * PAGE)
    assert arena.slab_bytes == 3 * PAGE
    arena.free(whole)
    with pytest.raises(TierFullError):
        arena.alloc(3 * PAGE + 1)


@pytest.mark.parametrize("budget", [0, 1, PAGE - 1])
def test_budget_below_a_page_holds_nothing(budget: int) -> None:
    with pytest.raises(TierFullError):
        HostArena(budget, pin=False).alloc(1)


def test_empty_slabs_make_room_for_a_larger_block() -> None:
    pages = CountingPages()
    arena = HostArena(8 * MIB, pin=True, pages=pages)
    blocks = [arena.alloc(2 * MIB) for _ in range(4)]
    assert len(pages.pinned) > 1
    for block in blocks:
        arena.free(block)
    assert arena.alloc(8 * MIB).nbytes == 8 * MIB
    assert len(pages.pinned) == 1


def test_small_use_takes_small_slabs() -> None:
    arena = HostArena(None, pin=False)
    arena.alloc(1)
    assert arena.slab_bytes == SMALLEST_SLAB
    for _ in range(5):
        arena.alloc(SMALLEST_SLAB)
    assert arena.slab_bytes == 16 * MIB


def test_reserve_makes_one_slab() -> None:
    pages = CountingPages()
    arena = HostArena(20 * MIB, pin=True, pages=pages)
    arena.reserve(10 * MIB)
    arena.reserve(5 * MIB)
    arena.alloc(10 * MIB)
    assert (len(pages.pinned), arena.slab_bytes) == (1, 10 * MIB)
    with pytest.raises(TierFullError):
        arena.reserve(20 * MIB + 1)


def test_large_slab_is_touched_whole() -> None:
    arena = HostArena(None, pin=False)
    arena.reserve(70 * MIB)
    assert not arena.alloc(70 * MIB).tensor[::PAGE].any()


def test_blocks_do_not_share_bytes() -> None:
    arena = HostArena(None, pin=False)
    blocks = [arena.alloc(size) for size in (1, 5000, 4096, 9000)]
    for index, block in enumerate(blocks):
        block.tensor.fill_(index)
    assert all((block.tensor == index).all() for index, block in enumerate(blocks))


@pytest.mark.parametrize("fail_at", [1, 2])
def test_failed_map_or_pin_leaves_nothing(fail_at: int) -> None:
    pages = CountingPages(fail_at)
    arena = HostArena(None, pin=True, pages=pages)
    with pytest.raises(TierFullError):
        arena.alloc(100)
    assert (arena.slab_bytes, arena.used_bytes, pages.pinned) == (0, 0, set())
    assert arena.alloc(100).nbytes == 100


def test_close_unpins_everything_and_blocks_stay_readable() -> None:
    pages = CountingPages()
    arena = HostArena(None, pin=True, pages=pages)
    held, freed = arena.alloc(4096), arena.alloc(4096)
    held.tensor.fill_(3)
    arena.free(freed)
    arena.close()
    arena.close()
    arena.free(held)
    assert (arena.slab_bytes, arena.used_bytes, pages.pinned) == (0, 0, set())
    assert (held.tensor == 3).all()


def test_dropped_arena_unpins() -> None:
    pages = CountingPages()
    HostArena(None, pin=True, pages=pages).alloc(4096)
    gc.collect()
    assert pages.pinned == set()


def test_freed_fences_reach_the_next_owner() -> None:
    arena = HostArena(2 * PAGE, pin=False)
    first, second = arena.alloc(PAGE), arena.alloc(PAGE)
    out, old, new = Fence(Lane.COPY_OUT, 1), Fence(Lane.COPY_IN, 2), Fence(Lane.COPY_IN, 3)
    arena.free(first, [old, out])
    arena.free(second, [new])
    assert set(arena.alloc(2 * PAGE).fences) == {out, new}


def test_unused_block_passes_its_fences_on() -> None:
    arena = HostArena(PAGE, pin=False)
    fence = Fence(Lane.COPY_IN, 2)
    arena.free(arena.alloc(PAGE), [fence])
    arena.free(arena.alloc(PAGE))
    assert arena.alloc(PAGE).fences == (fence,)


def test_unmapping_waits_for_the_copies_of_freed_blocks() -> None:
    arena = HostArena(None, pin=False)
    gate = Gate(Lane.COPY_IN, 0, threading.Event())
    arena.free(arena.alloc(10), [gate])
    arena.close()
    assert gate.passed.is_set()


def test_made_in_inference_mode_used_outside() -> None:
    arena = HostArena(None, pin=False)
    with torch.inference_mode():
        block = arena.alloc(10)
    block.tensor.fill_(1)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5 * PAGE)), max_size=60))
def test_never_beyond_the_budget(steps: list[tuple[bool, int]]) -> None:
    budget = 16 * PAGE
    arena = HostArena(budget, pin=False)
    held = []
    for takes, nbytes in steps:
        if takes:
            try:
                held.append(arena.alloc(nbytes))
            except TierFullError:
                assert held
        elif held:
            arena.free(held.pop(nbytes % len(held)))
        assert arena.used_bytes == sum(round_up(block.nbytes) for block in held)
        assert arena.used_bytes <= arena.slab_bytes <= budget
    for block in held:
        arena.free(block)
    assert arena.used_bytes == 0
    assert arena.alloc(budget).nbytes == budget


def test_threads_share_an_arena() -> None:
    arena = HostArena(None, pin=False)
    wrong: list[int] = []

    def work(mark: int) -> None:
        for _ in range(100):
            block = arena.alloc(1 + mark * 1000)
            block.tensor.fill_(mark)
            if not (block.tensor == mark).all():
                wrong.append(mark)
            arena.free(block)

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert arena.used_bytes == 0


def test_the_same_bytes_are_given_out_again_for_the_same_size() -> None:
    arena = HostArena(None, pin=False)
    first = arena.alloc(5 * PAGE)
    arena.alloc(PAGE)
    place = first.tensor.data_ptr()
    arena.free(first)
    assert arena.alloc(5 * PAGE).tensor.data_ptr() == place


def test_blocks_given_back_are_joined_for_a_larger_one() -> None:
    arena = HostArena(4 * PAGE, pin=False)
    blocks = [arena.alloc(PAGE) for _ in range(4)]
    for block in blocks:
        arena.free(block)
    assert arena.alloc(4 * PAGE).nbytes == 4 * PAGE


def test_freeing_twice_frees_nothing_of_the_next_owner() -> None:
    arena = HostArena(PAGE, pin=False)
    first = arena.alloc(PAGE)
    arena.free(first)
    second = arena.alloc(PAGE)
    arena.free(first)
    assert arena.used_bytes == PAGE
    arena.free(second)
    assert arena.used_bytes == 0
