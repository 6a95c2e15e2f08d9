"""What an iteration waited, and how fast it went, is asked of the device later than it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from belady.ir.timeline import Lane
from belady.measure.monitor import Monitor
from belady.memory.carrier import Carrier
from belady.memory.lanes import CpuLanes

CPU = torch.device("cpu")


def test_the_end_of_an_iteration_waits_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[object, object]]()

    def seconds(_: CpuLanes, start: object, end: object) -> float:
        asked.append((start, end))
        return 2.0

    monkeypatch.setattr(CpuLanes, "seconds", seconds)
    carrier = Carrier(CPU)
    monitor = Monitor(CPU, carrier)

    def iteration(waits: int) -> Any:
        sample = monitor.begin(1, paced=True)
        sample.passed(0)
        for _ in range(waits):
            with carrier._meter.stall(Lane.COPY_IN):
                pass
        sample.passed(1)
        return monitor.end(sample)

    before, last = iteration(waits=3), iteration(waits=1)
    assert asked == []
    # Each has its own, whenever it is asked, and however often: between four waits lie the rests.
    assert (before.stall_seconds, before.stall_seconds) == (6.0, 6.0)
    assert len(asked) == 3
    assert (before.paced, before.paced) == ({(0, 1): 8.0}, {(0, 1): 8.0})
    assert (last.stall_seconds, last.paced) == (2.0, {(0, 1): 4.0})
    assert len(asked) == 3 + 4 + 1 + 2
