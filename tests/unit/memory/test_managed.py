"""Managed blocks: what moves when, whom it follows, and what is refused."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

import pytest
import torch

from belady.errors import TierError, TierFullError
from belady.ir.plan import Managed
from belady.ir.timeline import Lane, Moved
from belady.ir.trace import Tier
from belady.memory.blocks import GRAIN_BYTES
from belady.memory.carrier import Carrier
from belady.memory.contents import Paged
from belady.memory.driver import CudaDriver
from belady.memory.lanes import CpuLanes, lanes_for
from tests.support.managed import ManagedCarrier, TwoSided
from tests.support.memory import ThreadLanes, random_bytes

MIB = 2**20
CPU = torch.device("cpu")
OPT = Managed(1, 2, 4, 5)


@pytest.fixture
def carrier() -> Iterator[ManagedCarrier]:
    made = ManagedCarrier(CpuLanes(CPU), TwoSided())
    yield made
    made.close()
    gc.collect()
    assert made.driver.blocks == 0
    assert made.kept_back[-1:] in ([0], [])


def paged(carrier: ManagedCarrier, tensor: torch.Tensor, decision: Managed = OPT) -> Paged:
    return Paged(tensor, carrier, decision)


def test_a_value_goes_out_and_comes_back(carrier: ManagedCarrier) -> None:
    tensor = random_bytes(5 * MIB)
    expected = tensor.clone()
    content = paged(carrier, tensor)
    content.send(Tier.HOST)
    assert content.source is None
    tensor.fill_(0xEE)
    content.free()
    assert [*carrier.driver.resident()] == [False]
    content.bring()
    assert [*carrier.driver.resident()] == [True]
    assert torch.equal(content.take(), expected)
    assert [call[2:] for call in carrier.driver.calls] == [
        (True, True),
        (False, False),
        (True, False),
    ]
    moved = carrier.counters
    assert moved[Lane.COPY_OUT] == Moved(Lane.COPY_OUT, 5 * MIB, 1)
    assert moved[Lane.COPY_IN] == Moved(Lane.COPY_IN, 5 * MIB, 1)


def test_pages_fault_in_without_a_movement() -> None:
    carrier = ManagedCarrier(CpuLanes(CPU), TwoSided(faults=True))
    tensor = random_bytes(MIB)
    content = paged(carrier, tensor, Managed(1, 1, 5, 5, faults=True))
    content.send(Tier.HOST)
    assert carrier.paging.peak_here_bytes == MIB
    before = len(carrier.driver.calls)
    assert torch.equal(content.take(), tensor)
    assert len(carrier.driver.calls) == before
    carrier.close()


def test_a_block_is_kept_by_whatever_lies_on_it(carrier: ManagedCarrier) -> None:
    content = paged(carrier, random_bytes(MIB))
    content.send(Tier.HOST)
    view = content.take()[10:20]
    expected = view.clone()
    del content
    carrier.sweep()
    other = paged(carrier, random_bytes(MIB, seed=1))
    other.send(Tier.HOST)
    assert carrier.driver.blocks == 2
    assert torch.equal(view, expected)
    del view, other
    carrier.sweep()
    assert carrier.driver.blocks == 2
    assert not any(carrier.driver.resident())
    assert carrier.host_bytes == 0


def test_blocks_are_used_again_by_size(carrier: ManagedCarrier) -> None:
    for _ in range(3):
        for nbytes in (MIB, 3 * MIB):
            content = paged(carrier, random_bytes(nbytes))
            content.send(Tier.HOST)
            content.take()
            del content
    assert carrier.driver.allocated == 2
    assert carrier.paging.block_bytes == 3 * GRAIN_BYTES


def test_a_block_given_back_is_discarded_before_anything_comes(carrier: ManagedCarrier) -> None:
    first, second = (paged(carrier, random_bytes(MIB, seed=seed)) for seed in range(2))
    for content in (first, second):
        content.send(Tier.HOST)
        content.free()
    first.take()
    del first, content
    second.bring()
    assert [call[2:] for call in carrier.driver.calls[-2:]] == [(False, True), (True, False)]
    assert carrier.paging.peak_here_bytes == MIB


def test_a_second_read_gets_the_same_bytes(carrier: ManagedCarrier) -> None:
    content = paged(carrier, random_bytes(MIB))
    content.send(Tier.HOST)
    first = content.take()
    content.let_go()
    assert content.shared
    assert content.take().data_ptr() == first.data_ptr()
    assert carrier.counters[Lane.COPY_IN].copies == 1


def test_peaks_count_what_is_on_the_device_and_what_is_parked(carrier: ManagedCarrier) -> None:
    contents = [paged(carrier, random_bytes(MIB, seed=seed)) for seed in range(3)]
    for content in contents:
        content.send(Tier.HOST)
        content.free()
    assert carrier.paging.peak_here_bytes == MIB
    assert carrier.peak_host_bytes == carrier.host_bytes == 3 * MIB
    contents[0].bring()
    contents[1].bring()
    assert carrier.paging.peak_here_bytes == 2 * MIB
    carrier.reset_counters()
    assert carrier.paging.peak_here_bytes == 2 * MIB
    contents.clear()
    del content
    carrier.sweep()
    carrier.reset_counters()
    assert (carrier.paging.peak_here_bytes, carrier.peak_host_bytes) == (0, 0)


def test_what_is_claimed_is_there_and_kept_from_torch(carrier: ManagedCarrier) -> None:
    claim = carrier.paging.claim({3 * MIB: 2, MIB: 1}, room_bytes=5 * MIB)
    other = carrier.paging.claim({3 * MIB: 1, MIB: 3}, room_bytes=7 * MIB)
    assert carrier.driver.blocks == 2 + 3
    assert carrier.kept_back == [5 * MIB, 7 * MIB]
    other.close()
    other.close()
    assert carrier.driver.blocks == 2 + 1
    assert carrier.kept_back[-1] == 5 * MIB
    del claim, other
    again = carrier.paging.claim({MIB: 1}, room_bytes=MIB)
    assert carrier.driver.blocks == 1
    again.close()


def test_nothing_is_opened_for_a_plan_without_managed_values() -> None:
    carrier = Carrier("cpu")
    carrier.paging.claim({}, 0).close()
    assert carrier.paging.block_bytes == carrier.paging.peak_here_bytes == 0
    carrier.close()


def test_more_than_the_device_has_free_is_refused(carrier: ManagedCarrier) -> None:
    carrier.driver.room = 8 * MIB
    with pytest.raises(TierFullError, match=r"10\.00 MiB of managed memory .* has 8\.00 MiB free"):
        carrier.paging.claim({MIB: 5}, room_bytes=MIB)
    assert carrier.driver.allocated == 0
    assert carrier.kept_back == [0]
    carrier.paging.claim({MIB: 4}, room_bytes=MIB)
    contents = [paged(carrier, random_bytes(MIB)) for _ in range(5)]
    for content in contents[:4]:
        content.send(Tier.HOST)
    with pytest.raises(TierFullError, match="can hang the device"):
        contents[4].send(Tier.HOST)
    assert contents[4].source is not None


def test_a_refused_allocation_leaves_the_value_where_it_is(carrier: ManagedCarrier) -> None:
    carrier.driver.fails_at = 0
    content = paged(carrier, random_bytes(MIB))
    with pytest.raises(TierError, match="refused cuMemAllocManaged"):
        content.send(Tier.HOST)
    assert content.source is not None
    carrier.driver.fails_at = -1
    content.send(Tier.HOST)
    assert torch.equal(content.take(), random_bytes(MIB))


def test_a_movement_that_fails_gives_the_block_back(
    carrier: ManagedCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise TierError("refused")

    content = paged(carrier, random_bytes(MIB))
    with monkeypatch.context() as patched:
        patched.setattr(carrier.driver, "prefetch", refused)
        with pytest.raises(TierError, match="refused"):
            content.send(Tier.HOST)
    assert content.source is not None
    gc.collect()
    carrier.sweep()
    assert carrier.host_bytes == 0
    content.send(Tier.HOST)
    assert carrier.driver.allocated == 1


def test_what_lies_on_a_block_outlives_the_carrier() -> None:
    carrier = ManagedCarrier(CpuLanes(CPU), TwoSided())
    content = paged(carrier, random_bytes(MIB))
    content.send(Tier.HOST)
    tensor = content.take()
    carrier.close()
    assert torch.equal(tensor, random_bytes(MIB))
    assert carrier.driver.blocks == 1
    del tensor, content
    carrier._hub.sweep()
    assert carrier.driver.blocks == 0
    with pytest.raises(TierError, match="closed"):
        carrier.paging.send(random_bytes(MIB), faults=False)


def test_late_movements_are_waited_for() -> None:
    lanes = ThreadLanes(0.02)
    carrier = ManagedCarrier(lanes, TwoSided())
    contents = [paged(carrier, random_bytes(MIB, seed=seed)) for seed in range(4)]
    for _ in range(2):
        for content in contents:
            content.send(Tier.HOST)
            content.free()
        for content in reversed(contents):
            content.bring()
        for seed, content in enumerate(contents):
            assert torch.equal(content.take(), random_bytes(MIB, seed=seed))
        del content
        contents = [paged(carrier, random_bytes(MIB, seed=seed)) for seed in range(4)]
    carrier.close()


def test_a_machine_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belady.memory.driver.LIBRARY", "libno-such-driver.so.1")
    with pytest.raises(TierError, match="managed memory takes CUDA's driver"):
        CudaDriver(torch.device("cuda", 0))


# -- on a GPU ------------------------------------------------------------------------------------

_LAST_PREFETCH_LOCATION = 4
_HOST, _DEVICE = -1, 0


def lies(pointer: int, nbytes: int) -> int:
    """Where the driver was last told to move the block."""
    found = ctypes.c_int()
    code = ctypes.CDLL("libcuda.so.1").cuMemRangeGetAttribute(
        ctypes.byref(found),
        ctypes.c_size_t(4),
        ctypes.c_int(_LAST_PREFETCH_LOCATION),
        ctypes.c_uint64(pointer),
        ctypes.c_size_t(nbytes),
    )
    assert code == 0
    return found.value


def taken_by_a_block_that_comes_back(faults: bool) -> int:
    """Bytes of the device's free memory that a block of 64 MiB takes as it comes back."""
    carrier = Carrier("cuda")
    nbytes = 64 * MIB
    source = random_bytes(nbytes, "cuda")
    expected = source.clone()
    claim = carrier.paging.claim({nbytes: 1}, nbytes)
    content = Paged(source, carrier, Managed(1, 2, 5, 5, faults=faults))
    content.send(Tier.HOST)
    content.free()
    source.fill_(0xEE)
    torch.cuda.synchronize()
    parcel = content.parcel
    pointer = parcel._kept[1].data_ptr()  # type: ignore[union-attr]
    assert lies(pointer, nbytes) == _HOST
    free = torch.cuda.mem_get_info()[0]
    here = content.take()
    assert here.is_cuda
    assert here.data_ptr() == pointer
    assert torch.equal(here, expected)
    torch.cuda.synchronize()
    if not faults:
        assert lies(pointer, nbytes) == _DEVICE
    taken = free - torch.cuda.mem_get_info()[0]
    # Pages of a block that comes back stay with the driver, which counts them as used.
    del here, content, parcel
    carrier.sweep()
    claim.close()
    carrier.close()
    assert carrier.paging.block_bytes == 0
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize("faults", [False, True])
def test_a_block_really_leaves_the_device(faults: bool) -> None:
    # Other processes on the device move its free memory too, which hides it now and then. Alone, a
    # block that stays takes nothing however often it is tried.
    taken = (taken_by_a_block_that_comes_back(faults) for _ in range(9))
    assert any(it >= 32 * MIB for it in taken)


@pytest.mark.gpu
@pytest.mark.parametrize("discards", [True, False])
def test_blocks_of_one_size_carry_other_values_in_turn(
    discards: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not discards:
        monkeypatch.setattr(CudaDriver, "_discard", lambda *_, **__: 801)
    carrier = Carrier("cuda")
    for seed in range(20):
        source = random_bytes(3 * MIB + seed, "cuda", seed)
        expected = source.clone()
        content = Paged(source, carrier, OPT)
        content.send(Tier.HOST)
        del source
        # Memory let go too early would be written here.
        torch.full((3 * MIB + seed,), 0xEE, dtype=torch.uint8, device="cuda")
        content.free()
        content.bring()
        assert torch.equal(content.take(), expected)
        del content
    assert carrier.paging.block_bytes == 2 * GRAIN_BYTES
    carrier.close()


@pytest.mark.gpu
def test_backward_streams_are_waited_for() -> None:
    carrier = Carrier("cuda")
    stream = torch.cuda.Stream()
    content = Paged(random_bytes(4 * MIB, "cuda"), carrier, OPT)
    content.send(Tier.HOST)
    content.free()
    with torch.cuda.stream(stream):
        here = content.take()
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        read = here.clone()
    del here, content
    other = Paged(torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda"), carrier, OPT)
    other.send(Tier.HOST)
    torch.cuda.synchronize()
    assert torch.equal(read, random_bytes(4 * MIB, "cuda"))
    carrier.close()


@pytest.mark.gpu
def test_no_more_is_managed_than_the_device_has_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDriver, "free_bytes", lambda _: 8 * MIB)
    carrier = Carrier("cuda")
    with pytest.raises(TierFullError, match=r"10\.00 MiB of managed memory .* has 8\.00 MiB free"):
        carrier.paging.claim({MIB: 5}, MIB)
    carrier.close()


@pytest.mark.gpu
def test_what_the_driver_refuses_is_said() -> None:
    driver = CudaDriver(lanes_for("cuda").device)
    with pytest.raises(TierError, match=r"refused cuMemAllocManaged .* managed memory"):
        driver.allocate(0)


def test_pages_that_were_discarded_do_not_refuse_a_larger_claim(
    carrier: ManagedCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, size = carrier.driver, GRAIN_BYTES
    # What lies in blocks counts as used, whether anybody needs it or not.
    monkeypatch.setattr(driver, "free_bytes", lambda: 8 * size - driver.blocks * size)
    first = carrier.paging.claim({size: 4}, size)
    second = carrier.paging.claim({size: 6}, size)
    assert driver.blocks == 6
    with pytest.raises(TierFullError):
        carrier.paging.claim({size: 9}, size)
    # What others claim is there again.
    assert driver.blocks == 6
    first.close()
    second.close()
    assert driver.blocks == 0
