"""What torch's allocator hands out and takes back, in order, where nobody else notes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from belady.memory.ledger import Ledger, _numbered

MIB = 1 << 20
DEVICE = torch.device("cuda", 0)


def entry(action: str, addr: int, size: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size}


def test_blocks_have_numbers_and_are_all_gone_at_the_end() -> None:
    entries = [
        entry("free_completed", 7, 1),  # was there before
        entry("alloc", 7, 10),
        entry("segment_map", 7, 64),
        entry("free_requested", 7, 10),
        entry("free_completed", 7, 10),
        entry("alloc", 7, 20),
        entry("alloc", 100, 30),  # in a pool of its own
        entry("alloc", 200, 40),
        entry("free_completed", 100, 30),
    ]
    pools = [{"address": 100, "total_size": 100}]
    events, addresses = _numbered(entries, pools)
    assert events == [(0, 10), (0, 0), (1, 20), (2, 40), (1, 0), (2, 0)]
    assert addresses == [7, 7, 200]


def test_nothing_is_noted_of_a_cpu() -> None:
    ledger = Ledger(torch.device("cpu"))
    ledger.begin()
    torch.empty(MIB)
    assert ledger.end() == []


def noted() -> bool:
    return bool(torch._C._cuda_isHistoryEnabled())


@pytest.fixture
def apart() -> Iterator[torch.cuda.MemPool]:
    pool = torch.cuda.MemPool()
    yield pool
    torch.cuda.empty_cache()


def block(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8, device=DEVICE)


@pytest.mark.gpu
def test_a_device_notes_what_an_iteration_takes(apart: torch.cuda.MemPool) -> None:
    before, ledger = block(3), Ledger(DEVICE)
    ledger.begin()
    kept = block(5)
    del before
    with torch.cuda.use_mem_pool(apart):
        elsewhere = block(7)
    gone = block(11)
    del gone
    events = ledger.end()
    assert events == [(0, 5 * MIB), (1, 11 * MIB), (1, 0), (0, 0)]
    assert not noted()
    assert ledger.end() == []
    # Nothing of the first one is left in another.
    ledger.begin()
    del kept, elsewhere
    last = block(13)
    assert ledger.end() == [(0, 13 * MIB), (0, 0)]
    del last


@pytest.mark.gpu
def test_a_record_of_somebody_else_is_left_alone() -> None:
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=100)
    try:
        ledger = Ledger(DEVICE)
        ledger.begin()
        block(5)
        assert ledger.end() == []
        ledger.drop()
        assert noted()
    finally:
        torch.cuda.memory._record_memory_history(None)
