"""Fences are waited for asleep, and recording them holds nobody up."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from belady.ir.timeline import Lane
from belady.memory import fences
from belady.memory.fences import CudaFence
from belady.memory.lanes import CudaLanes

FENCES = 300


class Passing:
    """An event that has happened when it is asked for the last of some times."""

    def __init__(self, asked: int) -> None:
        self.left = asked

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


def fence_of(event: Passing) -> CudaFence:
    stands_in: Any = event
    return CudaFence(Lane.COMPUTE, 0, stands_in, stands_in)


def test_a_thread_sleeps_until_a_fence_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(fences.time, "sleep", slept.append)
    event = Passing(12)
    fence_of(event).synchronize()
    assert event.left == 0
    assert len(slept) == 11
    assert slept == sorted(slept)
    assert 0 < slept[0] < slept[-1] <= 1e-3


def test_a_fence_that_has_passed_costs_no_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fences.time, "sleep", pytest.fail)
    fence_of(Passing(1)).synchronize()


@pytest.mark.gpu
def test_any_number_of_fences_is_recorded_while_the_device_is_busy() -> None:
    device = torch.device("cuda", 0)
    carried = CudaLanes(device)
    source = torch.zeros(1 << 16, dtype=torch.uint8, device=device)
    target = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)

    def issue() -> float:
        begun = time.perf_counter()
        for _ in range(FENCES):
            home = carried.present()
            carried.wait(carried.copy(Lane.COPY_OUT, target, source, (home,)), home)
        return time.perf_counter() - begun

    issue()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    busy = carried.present()
    took = issue()
    # The device sleeps a second: had the host waited for it, it would have passed.
    assert not busy.event.query()  # type: ignore[no-untyped-call]
    busy.synchronize()
    torch.cuda.synchronize()
    assert took < 0.5
