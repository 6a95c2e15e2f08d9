"""The carrier on a CPU, and on a pretended device whose copies are asynchronous."""

from __future__ import annotations

import errno
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from belady.errors import SpillError, TierError, TierFullError
from belady.ir.timeline import Lane
from belady.ir.trace import Tier
from belady.memory.carrier import Arrival, Carrier, Parcel
from belady.memory.fences import Fence
from belady.memory.lanes import lanes_for
from belady.memory.staging import staging_bytes
from tests.support.memory import (
    CarrierUnderTest,
    FaultyFiles,
    SlowFiles,
    ThreadLanes,
    delayed_carrier,
    poisoned_carrier,
    random_bytes,
)

KIB, MIB = 2**10, 2**20
BELOW = [Tier.HOST, Tier.DISK]


def eio() -> OSError:
    return OSError(errno.EIO, "Input/output error")


def make(kind: str) -> CarrierUnderTest:
    if kind == "delayed":
        return delayed_carrier("cpu", 0.002)
    if kind == "poisoned":
        return poisoned_carrier("cpu")
    slow = 0.002 if kind == "slow threads" else 0.0
    # Little staging: parcels go in many pieces and wait for blocks.
    return CarrierUnderTest(
        "cpu",
        lanes=ThreadLanes(slow),
        files=SlowFiles(slow),
        host_budget=4 * MIB,
        poisoned=kind == "poisoned threads",
    )


KINDS = ["delayed", "poisoned", "threads", "slow threads", "poisoned threads"]


@pytest.fixture(params=KINDS)
def carrier(request: pytest.FixtureRequest) -> Iterator[CarrierUnderTest]:
    carrier = make(request.param)
    yield carrier
    carrier.close()
    left = {thread.name for thread in threading.enumerate()}
    assert not [name for name in left if name.startswith(("belady", "lane"))]


def nothing_held(carrier: CarrierUnderTest) -> bool:
    staged = 0 if carrier._staging is None else carrier._staging._nbytes
    return (carrier.host_bytes, carrier.disk_bytes) == (staged, 0)


def brought(parcel: Parcel) -> torch.Tensor:
    arrival = parcel.fetch()
    arrival.wait()
    return arrival.tensor


@pytest.mark.parametrize("tier", BELOW)
@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4097, 3 * MIB + 1])
def test_round_trip(carrier: CarrierUnderTest, tier: Tier, nbytes: int) -> None:
    source = random_bytes(nbytes)
    expected = source.clone()
    parcel = carrier.send(source, tier)
    assert (parcel.nbytes, parcel.tier) == (nbytes, tier)
    parcel.wait_sent()
    source.fill_(0xEE)
    first, second = parcel.fetch(), parcel.fetch()
    first.wait()
    second.wait()
    first.wait()
    assert torch.equal(first.tensor, expected)
    assert torch.equal(second.tensor, expected)
    first.tensor.zero_()
    assert torch.equal(brought(parcel), expected)
    parcel.release()
    parcel.release()
    assert nothing_held(carrier)


@pytest.mark.parametrize("tier", BELOW)
def test_fetch_before_sent(carrier: CarrierUnderTest, tier: Tier) -> None:
    """T8: the way back waits for the way out."""
    source = random_bytes(100_000)
    parcel = carrier.send(source, tier)
    assert torch.equal(brought(parcel), source)


@pytest.mark.parametrize("tier", BELOW)
def test_release_with_copies_in_flight(carrier: CarrierUnderTest, tier: Tier) -> None:
    """Room given back under a copy is written only after that copy."""
    arrivals: list[tuple[Arrival, torch.Tensor]] = []
    for seed in range(12):
        source = random_bytes(150_000, seed=seed)
        parcel = carrier.send(source, tier)
        arrivals.append((parcel.fetch(), source))
        parcel.release()
    for arrival, source in arrivals:
        arrival.wait()
        assert torch.equal(arrival.tensor, source)
    assert nothing_held(carrier)


@pytest.mark.parametrize("tier", BELOW)
def test_dropping_is_releasing(carrier: CarrierUnderTest, tier: Tier) -> None:
    parcel = carrier.send(random_bytes(10_000), tier)
    arrival = parcel.fetch()
    del parcel, arrival
    gc.collect()
    assert nothing_held(carrier)


@given(
    st.lists(
        st.tuples(st.sampled_from(["send", "fetch", "wait", "release"]), st.integers(0, 2**15)),
        max_size=25,
    )
)
def test_any_order_of_calls(steps: list[tuple[str, int]]) -> None:
    carrier = CarrierUnderTest("cpu", lanes=ThreadLanes(), host_budget=MIB, poisoned=True)
    parcels: list[tuple[Parcel, torch.Tensor]] = []
    arrivals: list[tuple[Arrival, torch.Tensor]] = []
    for seed, (step, number) in enumerate(steps):
        if step == "send":
            source = random_bytes(number, seed=seed)
            parcels.append((carrier.send(source, BELOW[number % 2]), source))
        elif parcels and step == "fetch":
            parcel, source = parcels[number % len(parcels)]
            arrivals.append((parcel.fetch(), source))
        elif arrivals and step == "wait":
            arrival, source = arrivals.pop(number % len(arrivals))
            arrival.wait()
            assert torch.equal(arrival.tensor, source)
        elif parcels and step == "release":
            parcels.pop(number % len(parcels))[0].release()
    for parcel, _ in parcels:
        parcel.release()
    assert carrier.disk_bytes == 0
    carrier.close()
    assert carrier.pinned_bytes == 0


def test_reused_block_waits_for_the_copy_that_reads_it() -> None:
    lanes = ThreadLanes()
    carrier = CarrierUnderTest("cpu", lanes=lanes, host_budget=4 * KIB)
    first, second = random_bytes(4096, seed=1), random_bytes(4096, seed=2)
    parcel = carrier.send(first, Tier.HOST)
    parcel.wait_sent()
    lanes.held[Lane.COPY_IN].clear()
    arrival = parcel.fetch()
    parcel.release()
    other = carrier.send(second, Tier.HOST)  # takes the same page, and must not write it yet
    lanes.held[Lane.COPY_IN].set()
    arrival.wait()
    assert torch.equal(arrival.tensor, first)
    assert torch.equal(brought(other), second)
    carrier.close()


def test_source_lives_until_it_is_sent() -> None:
    carrier = Carrier("cpu")
    source = random_bytes(10)
    alive = weakref.ref(source)
    parcel = carrier.send(source, Tier.HOST)
    del source
    assert alive() is not None
    parcel.wait_sent()
    assert alive() is None
    carrier.close()


@pytest.mark.parametrize("tier", BELOW)
def test_release_frees_the_source_only_after_its_copy(tier: Tier) -> None:
    lanes = ThreadLanes()
    carrier = CarrierUnderTest("cpu", lanes=lanes, host_budget=MIB)
    lanes.held[Lane.COPY_OUT].clear()
    parcel = carrier.send(random_bytes(10), tier)
    parcel.release()
    assert not lanes.issued[-1].event.is_set()
    threading.Timer(0.02, lanes.held[Lane.COPY_OUT].set).start()
    carrier.sweep()
    assert lanes.issued[-1].event.is_set()
    carrier.close()


def test_counters_and_peaks() -> None:
    carrier = Carrier("cpu")
    for tier in BELOW:
        parcel = carrier.send(random_bytes(5000), tier)
        parcel.wait_sent()
        brought(parcel)
        brought(parcel)
    moved = {lane: (it.nbytes, it.copies) for lane, it in carrier.counters.items()}
    assert moved == {
        Lane.COPY_OUT: (5000, 1),
        Lane.COPY_IN: (10_000, 2),
        Lane.DISK_WRITE: (5000, 1),
        Lane.DISK_READ: (10_000, 2),
    }
    del parcel
    assert (carrier.host_bytes, carrier.disk_bytes) == (0, 0)
    assert (carrier.peak_host_bytes, carrier.peak_disk_bytes) == (8192, 8192)
    carrier.reset_counters()
    assert (carrier.peak_host_bytes, carrier.peak_disk_bytes) == (0, 0)
    assert not any(it.nbytes for it in carrier.counters.values())
    carrier.close()


def test_staging_counts_every_lane() -> None:
    lanes = ThreadLanes()
    carrier = CarrierUnderTest("cpu", lanes=lanes, host_budget=MIB)
    parcel = carrier.send(random_bytes(200 * KIB), Tier.DISK)
    brought(parcel)
    moved = carrier.counters
    assert {it.nbytes for it in moved.values()} == {200 * KIB}
    assert {it.copies for it in moved.values()} == {7}  # pieces of 32 KiB
    assert carrier.host_bytes == carrier.peak_host_bytes == staging_bytes(MIB) == 128 * KIB
    carrier.close()


def test_stalls_are_the_seconds_blocked() -> None:
    carrier = delayed_carrier("cpu", 0.02)
    parcel = carrier.send(random_bytes(1000), Tier.DISK)
    parcel.wait_sent()
    brought(parcel)
    assert 0.01 < carrier.stalls[Lane.DISK_WRITE] < 5
    assert carrier.stalls[Lane.DISK_READ] > 0.01
    assert carrier.stalls[Lane.COPY_OUT] == 0
    carrier.reset_counters()
    carrier.measure_stalls = False
    brought(parcel)
    assert set(carrier.collect_stalls().values()) == {0.0}
    carrier.close()


def test_host_budget_is_exact_and_reserve_counts() -> None:
    carrier = Carrier("cpu", host_budget=2 * MIB)
    carrier.reserve(2 * MIB)
    assert carrier.pinned_bytes == 2 * MIB
    parcel = carrier.send(random_bytes(2 * MIB), Tier.HOST)
    with pytest.raises(TierFullError):
        carrier.send(random_bytes(1), Tier.HOST)
    parcel.release()
    assert carrier.send(random_bytes(2 * MIB, seed=1), Tier.HOST).nbytes == 2 * MIB
    carrier.close()


@pytest.mark.parametrize("threads", [False, True])
def test_disk_budget_is_exact(threads: bool) -> None:
    lanes = ThreadLanes() if threads else None
    carrier = CarrierUnderTest("cpu", lanes=lanes, disk_budget=64 * KIB, host_budget=MIB)
    parcel = carrier.send(random_bytes(64 * KIB), Tier.DISK)
    with pytest.raises(TierFullError):
        carrier.send(random_bytes(1), Tier.DISK)
    with pytest.raises(TierFullError):
        carrier.send(random_bytes(64 * KIB + 1), Tier.DISK)
    parcel.release()
    parcel = carrier.send(random_bytes(64 * KIB, seed=5), Tier.DISK)
    assert torch.equal(brought(parcel), random_bytes(64 * KIB, seed=5))
    carrier.close()


def test_no_room_for_staging_is_refused() -> None:
    lanes = ThreadLanes()
    carrier = CarrierUnderTest("cpu", lanes=lanes, host_budget=32 * KIB)
    for _ in range(2):
        with pytest.raises(TierFullError, match="staging"):
            carrier.open_disk()
    assert carrier.send(random_bytes(32 * KIB), Tier.HOST).nbytes == 32 * KIB
    carrier.close()


def test_unusable_folder_is_known_at_the_start(tmp_path: Path) -> None:
    carrier = Carrier("cpu", spill_dir=str(tmp_path / "missing"))
    with pytest.raises(SpillError, match="missing"):
        carrier.open_disk()
    carrier.close()


@pytest.mark.parametrize("call", ["pwrite", "pread"])
@pytest.mark.parametrize("threads", [False, True])
def test_failed_disk_is_an_error_and_gives_everything_back(threads: bool, call: str) -> None:
    lanes = ThreadLanes() if threads else None
    files = FaultyFiles(2, eio, for_ever=True, calls=frozenset({call}))
    carrier = CarrierUnderTest("cpu", lanes=lanes, files=files, host_budget=MIB)
    parcels = [carrier.send(random_bytes(50_000, seed=seed), Tier.DISK) for seed in range(3)]
    arrivals = [parcel.fetch() for parcel in parcels]
    failures = 0
    for arrival in arrivals:
        try:
            arrival.wait()
        except SpillError as error:
            failures += isinstance(error.__cause__, OSError)
    assert failures >= 2
    if call == "pwrite":
        with pytest.raises(SpillError):
            parcels[-1].wait_sent()
    for parcel in parcels:
        parcel.release()
    assert nothing_held(carrier)
    carrier.close()


class BrokenLanes(ThreadLanes):
    """The copy after the next ``good`` ones cannot be issued."""

    good = 0

    def copy(self, *args: object, **kwargs: object) -> Fence:
        if self.good == 0:
            raise RuntimeError("launch failed")
        self.good -= 1
        return super().copy(*args, **kwargs)  # type: ignore[arg-type]


# 200_000 bytes are one copy to the host, and seven pieces to disk.
@pytest.mark.parametrize(("tier", "good"), [(Tier.HOST, 0), (Tier.DISK, 0), (Tier.DISK, 6)])
def test_failed_copy_out_gives_everything_back(tier: Tier, good: int) -> None:
    lanes = BrokenLanes()
    carrier = CarrierUnderTest("cpu", lanes=lanes, host_budget=MIB)
    lanes.good = good
    with pytest.raises(RuntimeError, match="launch failed"):
        carrier.send(random_bytes(200_000), tier)
    assert_works_again(carrier, tier)


@pytest.mark.parametrize(("tier", "good"), [(Tier.HOST, 1), (Tier.DISK, 7), (Tier.DISK, 13)])
def test_failed_copy_in_gives_everything_back(tier: Tier, good: int) -> None:
    lanes = BrokenLanes()
    carrier = CarrierUnderTest("cpu", lanes=lanes, host_budget=MIB)
    lanes.good = good
    parcel = carrier.send(random_bytes(200_000), tier)
    with pytest.raises(RuntimeError, match="launch failed"):
        brought(parcel)
    lanes.good = 7
    assert torch.equal(brought(parcel), random_bytes(200_000))
    parcel.release()
    assert_works_again(carrier, tier)


def assert_works_again(carrier: CarrierUnderTest, tier: Tier) -> None:
    assert isinstance(carrier._lanes, BrokenLanes)
    carrier._lanes.good = 14
    assert nothing_held(carrier)
    source = random_bytes(200_000, seed=9)
    assert torch.equal(brought(carrier.send(source, tier)), source)
    carrier.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: torch.zeros(3), "not torch.float32"),
        (lambda: torch.zeros(2, 2, dtype=torch.uint8), r"shape \(2, 2\)"),
        (lambda: torch.zeros(4, dtype=torch.uint8)[::2], "contiguous"),
        (lambda: torch.zeros(4, dtype=torch.uint8, device="meta"), "bytes of meta"),
    ],
)
def test_wrong_source_is_refused(wrong: Callable[[], torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Carrier("cpu").send(wrong(), Tier.HOST)


def test_wrong_tier_and_device_are_refused() -> None:
    with pytest.raises(ValueError, match="not to device"):
        Carrier("cpu").send(random_bytes(1), Tier.DEVICE)
    with pytest.raises(ValueError, match="only cpu and cuda"):
        Carrier("meta")


def test_closed(carrier: CarrierUnderTest) -> None:
    parcels = [carrier.send(random_bytes(10_000), tier) for tier in BELOW]
    carrier.close()
    carrier.close()
    with pytest.raises(TierError, match="closed"):
        carrier.send(random_bytes(1), Tier.HOST)
    for parcel in parcels:
        with pytest.raises(TierError, match="closed"):
            parcel.fetch()
        parcel.release()
    carrier.sweep()


@pytest.mark.parametrize("tier", BELOW)
def test_fetch_after_release(tier: Tier) -> None:
    carrier = Carrier("cpu")
    parcel = carrier.send(random_bytes(10), tier)
    parcel.release()
    with pytest.raises(TierError, match="released already"):
        parcel.fetch()
    carrier.close()


def test_lanes_are_made_once() -> None:
    assert lanes_for("cpu") is lanes_for(torch.device("cpu", 0))


def test_threads_share_a_carrier(carrier: CarrierUnderTest) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(5):
            source = random_bytes(10_000 + turn, seed=seed)
            parcel = carrier.send(source, BELOW[(seed + turn) % 2])
            if not torch.equal(brought(parcel), source):
                wrong.append(seed)
            parcel.release()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert nothing_held(carrier)
