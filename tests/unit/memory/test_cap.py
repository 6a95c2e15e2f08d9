"""A budget of CUDA memory holds whatever is asked for, and is undone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch

from belady.memory import cap
from belady.memory.cap import enforce, make_room, set_aside
from belady.memory.lanes import resolve

MIB = 2**20
PAGE = 20 * MIB
TOTAL = 1000 * MIB
SOMEWHERE = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the user left the allocator alone and no budget is open."""
    monkeypatch.setattr(cap, "_CAPS", {})
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)


# -- what the allocator is told, on any machine --------------------------------------------------


class Told:
    """Stands for torch's allocator on a device of `TOTAL` bytes."""

    def __init__(self) -> None:
        self.fraction = 0.9
        self.settings: list[str] = []
        self.emptied = 0

    @property
    def nbytes(self) -> int:
        return round(self.fraction * TOTAL)

    def set(self, fraction: float, device: torch.device) -> None:
        assert device == SOMEWHERE
        self.fraction = fraction

    def empty(self) -> None:
        self.emptied += 1


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    allocator = Told()
    properties = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", allocator.set)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: allocator.fraction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "empty_cache", allocator.empty)
    monkeypatch.setattr(
        torch._C, "_accelerator_setAllocatorSettings", allocator.settings.append, raising=False
    )
    return allocator


def test_the_limit_is_a_page_below_the_budget(told: Told) -> None:
    undo = enforce(SOMEWHERE, 400 * MIB)
    assert told.nbytes == 400 * MIB - PAGE
    assert told.settings == ["expandable_segments:True"]
    assert told.emptied == 1
    undo()
    assert told.fraction == 0.9
    assert told.settings == ["expandable_segments:True", "expandable_segments:False"]


def test_budgets_on_one_device_add_up(told: Told) -> None:
    undo_first = enforce(SOMEWHERE, 400 * MIB)
    undo_second = enforce(SOMEWHERE, 300 * MIB)
    assert told.nbytes == 700 * MIB - PAGE
    undo_first()
    assert told.nbytes == 300 * MIB - PAGE
    undo_second()
    assert told.fraction == 0.9
    assert len(told.settings) == 2


def test_a_budget_below_a_page_allows_one(told: Told) -> None:
    enforce(SOMEWHERE, 1)
    assert told.nbytes == PAGE


def test_a_budget_above_the_device_is_the_device(told: Told) -> None:
    enforce(SOMEWHERE, 2 * TOTAL)
    assert told.fraction == 1


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_the_user_configured_stays(
    name: str, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "max_split_size_mb:64")
    undo = enforce(SOMEWHERE, 400 * MIB)
    assert told.nbytes == 400 * MIB
    undo()
    assert told.fraction == 0.9
    assert told.settings == []


@pytest.mark.parametrize("grows", [0, 6 * MIB])
def test_small_blocks_get_the_room_that_they_had(
    grows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, int]] = []
    stats = {
        "reserved_bytes.small_pool.peak": 8 * MIB + grows,
        "reserved_bytes.small_pool.current": 8 * MIB,
    }
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: stats)
    monkeypatch.setattr(cap, "put_first", lambda _, forget: done.append(("first", 0)))
    monkeypatch.setattr(cap, "set_aside", lambda _, nbytes: done.append(("aside", nbytes)))
    make_room(SOMEWHERE, 100 * MIB)
    assert done == [("first", 0), ("aside", 100 * MIB - grows)]
    done.clear()
    make_room(torch.device("cpu"), 100 * MIB)
    assert done == []


def test_what_is_set_aside_is_whole_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 50 * MIB)
    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: taken.append(nbytes))
    for total in (50 * MIB, 60 * MIB, 50 * MIB + PAGE, 50 * MIB + 2 * PAGE - 1):
        set_aside(SOMEWHERE, total)
    # Never more than was asked for.
    assert taken == [PAGE, PAGE]


# -- what it then does ---------------------------------------------------------------------------


@pytest.fixture
def device() -> Iterator[torch.device]:
    yield resolve("cuda")
    torch.cuda.empty_cache()


def open_budget(device: torch.device, nbytes: int) -> tuple[int, Callable[[], None]]:
    """Enforce ``nbytes`` beyond what the process holds already; gives the budget."""
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved(device) + nbytes
    return budget, enforce(device, budget)


def press(device: torch.device, sizes: list[int], budget: int) -> int:
    """Take and give back blocks, more than fit; gives how often one was refused."""
    generator, held, refused = random.Random(0), [], 0
    for size in sizes:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            refused += 1
            generator.shuffle(held)
            del held[len(held) // 2 :]
        assert torch.cuda.memory_reserved(device) <= budget
    return refused


def scales(generator: random.Random) -> list[int]:
    """From a few bytes to a good part of the budget, each order of magnitude as often."""
    return [int(2 ** generator.uniform(6, 27)) for _ in range(1500)]


def around_pages(generator: random.Random) -> list[int]:
    """Just below, at and just above multiples of what the allocator maps at once."""
    units = (2 * MIB, 10 * MIB, PAGE)
    near = [generator.choice(units) + generator.randint(-1, 1) for _ in range(600)]
    return [generator.randint(1, 5) * size for size in near]


def one_after_another(_: random.Random) -> list[int]:
    """A little more than a page each, until well over the budget."""
    return [21 * MIB] * 40


PRESSURE = (scales, around_pages, one_after_another)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [scales, around_pages, one_after_another], ids=lambda sizes: sizes.__name__
)
@pytest.mark.parametrize("odd", [0, 7 * MIB, 19 * MIB + 1])
def test_no_more_is_reserved_than_the_budget(
    sizes: Callable[[random.Random], list[int]], odd: int, device: torch.device
) -> None:
    budget, undo = open_budget(device, 512 * MIB + odd)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        assert press(device, sizes(random.Random(1)), budget)
        peak = torch.cuda.max_memory_reserved(device)
    finally:
        undo()
    assert peak <= budget
    # It came close, or nothing would be shown.
    assert peak >= budget - (3 * PAGE if sizes is one_after_another else 128 * MIB)


@pytest.mark.gpu
def test_after_a_budget_more_can_be_reserved(device: torch.device) -> None:
    before = torch.cuda.get_per_process_memory_fraction(device)
    _, undo = open_budget(device, 128 * MIB)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device=device)
    finally:
        undo()
    assert torch.cuda.get_per_process_memory_fraction(device) == pytest.approx(before)
    torch.empty(256 * MIB, dtype=torch.uint8, device=device)


@pytest.mark.gpu
def test_what_is_set_aside_is_one_piece(device: torch.device) -> None:
    budget, undo = open_budget(device, 512 * MIB)
    try:
        room = 300 * MIB
        total = torch.cuda.memory_reserved(device) + room
        set_aside(device, total)
        reserved = torch.cuda.memory_reserved(device)
        assert total <= reserved <= total + PAGE <= budget
        whole = torch.empty(room, dtype=torch.uint8, device=device)
        assert torch.cuda.memory_reserved(device) == reserved
        del whole
        set_aside(device, total)
        assert torch.cuda.memory_reserved(device) == reserved
    finally:
        undo()


@pytest.mark.gpu
def test_setting_more_aside_than_there_is_does_nothing(device: torch.device) -> None:
    budget, undo = open_budget(device, 256 * MIB)
    try:
        kept = torch.ones(32 * MIB, dtype=torch.uint8, device=device)
        set_aside(device, 2 * budget)
        assert torch.cuda.memory_reserved(device) <= budget
        assert (kept == 1).all()
        # And what fits can still be had.
        torch.empty(128 * MIB, dtype=torch.uint8, device=device)
    finally:
        undo()


@pytest.mark.gpu
def test_nothing_is_set_aside_where_enough_is_reserved(device: torch.device) -> None:
    kept = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    reserved = torch.cuda.memory_reserved(device)
    set_aside(device, reserved // 2)
    assert torch.cuda.memory_reserved(device) == reserved
    assert (kept == 1).all()
