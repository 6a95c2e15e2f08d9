"""The carrier on a GPU whose copies are late: what overtakes a copy shows."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from belady.errors import TierFullError
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.carrier import Carrier
from belady.memory.lanes import CudaLanes, lanes_for
from belady.memory.pages import PinnedPages
from belady.memory.slab import HostArena
from tests.support.memory import (
    CarrierUnderTest,
    SlowCudaLanes,
    delayed_carrier,
    poisoned_carrier,
    random_bytes,
)

pytestmark = pytest.mark.gpu

MIB = 2**20
BELOW = [Tier.HOST, Tier.DISK]
DELAY = 0.05


def sleep(seconds: float) -> None:
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]


def on_gpu(nbytes: int, seed: int = 0) -> torch.Tensor:
    return random_bytes(nbytes, "cuda", seed)


def overwrite_free_memory(nbytes: int) -> torch.Tensor:
    """Take memory that was freed just now, and write it at once."""
    return torch.full((nbytes,), 0xEE, dtype=torch.uint8, device="cuda")


@pytest.fixture
def slow() -> Iterator[CarrierUnderTest]:
    carrier = delayed_carrier("cuda", DELAY, host_budget=64 * MIB)
    yield carrier
    torch.cuda.synchronize()
    carrier.close()
    assert carrier.pinned_bytes == 0


@pytest.mark.parametrize("tier", BELOW)
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 5 * MIB + 1])
@pytest.mark.parametrize("make", [Carrier, poisoned_carrier], ids=["plain", "poisoned"])
def test_round_trip(make: type[Carrier], tier: Tier, nbytes: int) -> None:
    carrier = make("cuda", host_budget=32 * MIB)
    source = on_gpu(nbytes)
    expected = source.clone()
    parcel = carrier.send(source, tier)
    parcel.wait_sent()
    source.fill_(0xEE)
    first, second = parcel.fetch(), parcel.fetch()
    first.wait()
    second.wait()
    assert torch.equal(first.tensor, expected)
    assert torch.equal(second.tensor, expected)
    parcel.release()
    assert carrier.disk_bytes == 0
    carrier.close()
    carrier.close()


@pytest.mark.parametrize("tier", BELOW)
def test_source_dropped_after_wait_sent(slow: CarrierUnderTest, tier: Tier) -> None:
    source = on_gpu(4 * MIB)
    expected = source.clone()
    parcel = slow.send(source, tier)
    parcel.wait_sent()
    del source
    other = overwrite_free_memory(4 * MIB)
    arrival = parcel.fetch()
    arrival.wait()
    assert torch.equal(arrival.tensor, expected)
    assert (other == 0xEE).all()


@pytest.mark.parametrize("tier", BELOW)
def test_copy_out_waits_for_the_producer(slow: CarrierUnderTest, tier: Tier) -> None:
    source = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
    sleep(DELAY)
    source.fill_(7)
    parcel = slow.send(source, tier)
    arrival = parcel.fetch()
    arrival.wait()
    assert (arrival.tensor == 7).all()


@pytest.mark.parametrize("tier", BELOW)
def test_copy_in_waits_for_the_former_owner_of_its_memory(
    slow: CarrierUnderTest, tier: Tier
) -> None:
    parcel = slow.send(on_gpu(4 * MIB), tier)
    parcel.wait_sent()
    torch.cuda.synchronize()
    former = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    sleep(4 * DELAY)
    former.fill_(1)
    copy = former.clone()
    del former
    arrival = parcel.fetch()
    arrival.wait()
    assert (copy == 1).all()
    assert torch.equal(arrival.tensor, on_gpu(4 * MIB))


@pytest.mark.parametrize("tier", BELOW)
def test_release_with_copies_in_flight(slow: CarrierUnderTest, tier: Tier) -> None:
    """Each parcel takes the room of the one before while it is still being read."""
    arrivals = []
    for seed in range(6):
        parcel = slow.send(on_gpu(9 * MIB, seed), tier)
        parcel.wait_sent()
        arrivals.append(parcel.fetch())
        parcel.release()
    for seed, arrival in enumerate(arrivals):
        arrival.wait()
        assert torch.equal(arrival.tensor, on_gpu(9 * MIB, seed))


def test_block_reused_under_a_copy_in() -> None:
    carrier = delayed_carrier("cuda", DELAY, host_budget=2 * MIB)
    parcel = carrier.send(on_gpu(2 * MIB, 1), Tier.HOST)
    arrival = parcel.fetch()
    parcel.release()
    other = carrier.send(on_gpu(2 * MIB, 2), Tier.HOST)  # there is no other room
    arrival.wait()
    assert torch.equal(arrival.tensor, on_gpu(2 * MIB, 1))
    back = other.fetch()
    back.wait()
    assert torch.equal(back.tensor, on_gpu(2 * MIB, 2))
    carrier.close()


@pytest.mark.parametrize("tier", BELOW)
def test_arrival_dropped_unwaited(slow: CarrierUnderTest, tier: Tier) -> None:
    parcel = slow.send(on_gpu(4 * MIB), tier)
    parcel.wait_sent()
    arrival = parcel.fetch()
    del arrival
    slow.sweep()
    other = overwrite_free_memory(4 * MIB)
    torch.cuda.synchronize()
    assert (other == 0xEE).all()


@pytest.mark.parametrize("tier", BELOW)
def test_parcel_dropped_unsent(slow: CarrierUnderTest, tier: Tier) -> None:
    """Its source is not reused before the copy that reads it, nor its block after."""
    for seed in range(3):
        parcel = slow.send(on_gpu(4 * MIB, seed), tier)
        arrival = parcel.fetch()
        del parcel
        slow.sweep()
        other = overwrite_free_memory(4 * MIB)
        arrival.wait()
        assert torch.equal(arrival.tensor, on_gpu(4 * MIB, seed))
        assert (other == 0xEE).all()


@pytest.mark.parametrize("tier", BELOW)
def test_side_stream(slow: CarrierUnderTest, tier: Tier) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        source = torch.zeros(MIB, dtype=torch.uint8, device="cuda")
        sleep(DELAY)
        source.fill_(9)
        parcel = slow.send(source, tier)
        parcel.wait_sent()
        source.fill_(1)
        arrival = parcel.fetch()
        arrival.wait()
        result = arrival.tensor.clone()
    torch.cuda.current_stream().wait_stream(side)
    assert (result == 9).all()


@pytest.mark.parametrize("tier", BELOW)
def test_fetched_here_waited_there(slow: CarrierUnderTest, tier: Tier) -> None:
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    parcel = slow.send(on_gpu(MIB), tier)
    arrival = parcel.fetch()
    with torch.cuda.stream(side):
        arrival.wait()
        there = arrival.tensor.clone()
    side.synchronize()
    # The stream that owns the memory was ordered too, so it may be reused at once.
    del arrival
    other = overwrite_free_memory(MIB)
    assert torch.equal(there, on_gpu(MIB))
    assert (other == 0xEE).all()


@pytest.mark.parametrize("tier", BELOW)
def test_fetched_by_another_thread(slow: CarrierUnderTest, tier: Tier) -> None:
    parcel = slow.send(on_gpu(MIB), tier)
    parcel.wait_sent()
    found = []

    def work() -> None:
        arrival = parcel.fetch()
        arrival.wait()
        found.append(torch.equal(arrival.tensor, on_gpu(MIB)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(30)
    assert found == [True]


def test_the_host_does_not_wait() -> None:
    carrier = delayed_carrier("cuda", 0.3)
    carrier.reserve(4 * MIB)
    source = on_gpu(MIB)
    torch.cuda.synchronize()
    started = time.perf_counter()
    parcel = carrier.send(source, Tier.HOST)
    parcel.wait_sent()
    arrival = parcel.fetch()
    parcel.release()
    arrival.wait()
    assert time.perf_counter() - started < 0.2
    assert torch.equal(arrival.tensor, source)
    carrier.close()


def test_stalls_are_measured_on_demand(slow: CarrierUnderTest) -> None:
    parcel = slow.send(on_gpu(MIB), Tier.HOST)
    parcel.wait_sent()
    assert set(slow.collect_stalls().values()) == {0.0}
    slow.measure_stalls = True
    arrival = parcel.fetch()
    arrival.wait()
    stalls = slow.collect_stalls()
    assert DELAY / 3 < stalls[Lane.COPY_IN] < 20 * DELAY
    assert stalls[Lane.COPY_OUT] == 0


def test_arena_is_pinned() -> None:
    arena = HostArena(None, pin=True)
    block = arena.alloc(3 * MIB)
    assert block.tensor.is_pinned()
    arena.close()


def test_refused_pin_is_typed_and_harmless() -> None:
    pages = PinnedPages()
    arena = HostArena(None, pin=True, pages=pages)
    block = arena.alloc(2 * MIB)
    with pytest.raises(TierFullError, match="could not pin 2097152 bytes"):
        pages.pin(block.tensor.data_ptr(), 2 * MIB)
    assert torch.ones(3, device="cuda").sum().item() == 3
    arena.close()


def test_address_can_be_pinned_again_after_a_dropped_arena() -> None:
    for _ in range(20):
        HostArena(None, pin=True).alloc(2 * MIB).tensor.fill_(1)
    torch.cuda.synchronize()


def test_out_of_memory_at_fetch_leaves_the_parcel_whole(slow: CarrierUnderTest) -> None:
    parcel = slow.send(on_gpu(64 * MIB // 2), Tier.HOST)
    parcel.wait_sent()
    torch.cuda.empty_cache()
    fraction = (torch.cuda.memory_reserved() + MIB) / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(fraction)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            parcel.fetch()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    arrival = parcel.fetch()
    arrival.wait()
    assert torch.equal(arrival.tensor, on_gpu(32 * MIB))


def test_one_pair_of_streams_for_life() -> None:
    assert lanes_for("cuda") is lanes_for(f"cuda:{torch.cuda.current_device()}")
    assert isinstance(lanes_for("cuda"), CudaLanes)
    assert not isinstance(lanes_for("cuda"), SlowCudaLanes)


def test_no_device_memory_is_left() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    carrier = Carrier("cuda", host_budget=64 * MIB)
    for tier in BELOW:
        parcel = carrier.send(on_gpu(4 * MIB), tier)
        parcel.wait_sent()
        parcel.fetch().wait()
        del parcel
    carrier.close()
    assert torch.cuda.memory_allocated() == before
