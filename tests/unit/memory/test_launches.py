"""What was captured runs again where it ran; a capture that fails leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch

from belady.ir.trace import Tier
from belady.memory.cap import PAGE_BYTES, SMALL_PAGE_BYTES, WALL_BYTES, enforce
from belady.memory.capturing import LackingError
from belady.memory.fixed import FixedCarrier
from belady.memory.lanes import lanes_for
from belady.memory.launches import Launches
from belady.simulate.coming import Life
from belady.simulate.holes import Holes
from belady.simulate.packing import Packing

DEVICE = torch.device("cuda", 0)
MANY = 1 << 20

pytestmark = pytest.mark.gpu


def doubled(launches: Launches, given: torch.Tensor) -> torch.Tensor:
    """What a launch makes of ``given`` times two."""
    launch, made = launches.capture(lambda: given * 2)
    launches.over()
    launch()
    return made.clone()


def test_a_launch_reads_and_writes_where_it_was_captured() -> None:
    given = torch.arange(MANY, device=DEVICE, dtype=torch.float32)
    launches = Launches(DEVICE)
    launch, made = launches.capture(lambda: given * 2)
    seen = launches.seen(made)
    for factor in (1.0, 3.0):
        given.fill_(factor)
        launch()
        assert torch.equal(seen, torch.full_like(given, 2 * factor))
    assert launches.peak_bytes == 0
    launches.over()
    assert launches.peak_bytes > 2 * MANY * 4


def ends(holes: Holes | None, *sizes: int) -> list[int]:
    """MiB between where a pool begins and where blocks of so many MiB end, taken and held."""
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved(DEVICE) + 400 * MANY
    launches = Launches(DEVICE, holes, room)
    _, made = launches.capture(
        lambda: (
            launches.divide(),
            [torch.zeros(it * MANY, dtype=torch.uint8, device=DEVICE) for it in sizes],
        )
    )
    launches.over()
    _, blocks = made
    first = min(it.data_ptr() for it in blocks)
    found = [(it.data_ptr() + it.nbytes - first) // MANY for it in blocks]
    assert launches.reserved_bytes <= room
    # What was set aside was not used.
    assert launches.peak_bytes < room - 100 * MANY
    del made, blocks
    launches.forget()
    return found


@pytest.fixture
def expandable() -> Iterator[None]:
    """Segments as they are under a budget."""
    undo = enforce(DEVICE, 1 << 36)
    yield
    undo()


@pytest.mark.usefixtures("expandable")
def test_blocks_of_a_pool_lie_between_its_walls() -> None:
    assert ends((), 64, 32) == [64, 96]
    # The first block fits in, and the second lies behind the wall.
    assert ends((64 * MANY,), 64, 32) == [64, 98]
    # The larger one has the hole, whatever is asked for first, and the smaller what is left.
    assert ends((64 * MANY, 32 * MANY), 32, 64, 16) == [98, 64, 116]


@pytest.mark.usefixtures("expandable")
def test_packed_blocks_that_have_no_room_are_known_at_once() -> None:
    end, small = 3 * PAGE_BYTES - WALL_BYTES, SMALL_PAGE_BYTES + 1
    packing = Packing([Life(end, 0, 0)], (0,), end, small)

    def lacking(room: int) -> int:
        torch.cuda.empty_cache()
        launches = Launches(DEVICE, (), torch.cuda.memory_reserved(DEVICE) + room, packing)
        try:
            launches.capture(launches.divide)
        except LackingError as error:
            return error.nbytes
        finally:
            launches.over()
            launches.forget()
        return 0

    # And what torch keeps for a capture.
    needed = lacking(0)
    assert needed >= 3 * PAGE_BYTES + 2 * SMALL_PAGE_BYTES
    assert lacking(needed - 5) == 5


@pytest.mark.parametrize("holes", [None, ()])
def test_a_pool_with_all_of_its_room_has_no_need_to_grow(holes: Holes | None) -> None:
    """Under a cap torch maps more only where there is room for all of what is asked for."""
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved(DEVICE) + 400 * MANY
    undo = enforce(DEVICE, room)
    launches = Launches(DEVICE, holes, room)

    def issue() -> list[torch.Tensor]:
        launches.divide()
        kept = torch.zeros(100 * MANY, dtype=torch.uint8, device=DEVICE)
        torch.zeros(150 * MANY, dtype=torch.uint8, device=DEVICE)
        return [kept, torch.zeros(240 * MANY, dtype=torch.uint8, device=DEVICE)]

    try:
        with nullcontext() if holes == () else pytest.raises(torch.OutOfMemoryError):
            launches.capture(issue)
        launches.over()
    finally:
        undo()
        gc.collect()
        launches.forget()


def test_what_waits_for_the_device_is_refused_and_nothing_stays() -> None:
    given = torch.ones(MANY, device=DEVICE)
    before = torch.cuda.memory_allocated(DEVICE)
    torch.cuda.manual_seed(3)
    expected = torch.randn(4, device=DEVICE)
    torch.cuda.manual_seed(3)
    launches = Launches(DEVICE)
    with pytest.raises(RuntimeError):
        launches.capture(lambda: (torch.randn(8, device=DEVICE), given.sum().item()))
    launches.over()
    # The allocator gives back, pools come and go, and random numbers go on as if nothing was.
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        torch.empty(MANY, device=DEVICE)
    del pool, launches
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.equal(torch.randn(4, device=DEVICE), expected)
    assert torch.equal(doubled(Launches(DEVICE), given), 2 * given)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated(DEVICE) <= before + expected.nbytes + 512


def test_a_capture_that_lacks_memory_is_refused() -> None:
    given = torch.ones(MANY, device=DEVICE)
    launches = Launches(DEVICE)
    torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            launches.capture(lambda: (given + 1, torch.empty(1 << 30, device=DEVICE)))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    launches.over()
    torch.cuda.empty_cache()
    assert torch.equal(doubled(Launches(DEVICE), given), 2 * given)


def test_a_capture_that_lacks_memory_with_copies_under_way_says_so() -> None:
    given, before = torch.ones(MANY, dtype=torch.uint8, device=DEVICE), _allocated()
    place = torch.empty(MANY, dtype=torch.uint8, pin_memory=True)
    carrier, launches = FixedCarrier(lanes_for(DEVICE), {7: place}), Launches(DEVICE)
    torch.cuda.set_per_process_memory_fraction(2**28 / torch.cuda.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError):
            launches.capture(
                lambda: (carrier.send(given + 1, Tier.HOST, 7), torch.empty(1 << 30, device=DEVICE))
            )
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    launches.over()
    torch.cuda.empty_cache()
    assert _allocated() <= before
    assert torch.equal(doubled(Launches(DEVICE), given), 2 * given)


def _allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated(DEVICE)


def test_copies_to_fixed_places_are_launched_too() -> None:
    given = torch.zeros(MANY, dtype=torch.uint8, device=DEVICE)
    place = torch.empty(MANY, dtype=torch.uint8, pin_memory=True)
    carrier, launches = FixedCarrier(lanes_for(DEVICE), {7: place}), Launches(DEVICE)

    def there() -> object:
        parcel = carrier.send(given + 1, Tier.HOST, 7)
        carrier.join()
        return parcel

    def back() -> torch.Tensor:
        arrival = parcel.fetch()
        arrival.wait()
        made = arrival.tensor + 1
        carrier.join()
        return made

    out, parcel = launches.capture(there)
    into, made = launches.capture(back)
    launches.over()
    for number in (3, 5):
        given.fill_(number)
        out()
        into()
        assert torch.equal(made, torch.full_like(given, number + 2))
