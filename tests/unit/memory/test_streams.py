"""Streams are asked for each time, and met as one object; those here stand in for CUDA's."""

from __future__ import annotations

import pytest
import torch

from belady.memory import streams
from belady.memory.streams import current_stream

NAMES = [(0, 0, 1), (7, 0, 1), (7, 1, 1)]


class Device:
    """What torch says of the current streams: a name by device, and an object made each time."""

    def __init__(self) -> None:
        self.current = {0: NAMES[0], 1: NAMES[2]}
        self.made: list[tuple[int, int, int]] = []

    def name(self, index: int) -> tuple[int, int, int]:
        return self.current[index]

    def stream(self, index: int) -> object:
        self.made.append(self.current[index])
        return object()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(streams, "_STREAMS", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentStream", device.name, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", device.stream)
    return device


def test_a_cpu_has_no_stream() -> None:
    assert current_stream(torch.device("cpu")) is None


def test_a_switch_of_streams_is_seen_at_once(device: Device) -> None:
    here = torch.device("cuda", 0)
    usual = current_stream(here)
    device.current[0] = NAMES[1]
    side = current_stream(here)
    assert side is not usual
    device.current[0] = NAMES[0]
    assert current_stream(here) is usual
    assert device.made == NAMES[:2]


def test_streams_of_two_devices_are_two(device: Device) -> None:
    device.current[0] = NAMES[1]
    streams = [current_stream(torch.device("cuda", index)) for index in (0, 1)]
    assert streams[0] is not streams[1]
    assert device.made == NAMES[1:]


@pytest.mark.gpu
def test_it_is_the_stream_that_torch_names() -> None:
    here = torch.device("cuda", 0)
    side = torch.cuda.Stream(here)  # type: ignore[no-untyped-call]
    assert current_stream(here) == torch.cuda.current_stream(here)
    with torch.cuda.stream(side):
        assert current_stream(here) == side
    assert current_stream(here) == torch.cuda.current_stream(here) != side
