"""Whose stream a thread goes on with when what it was lent is over, told without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from belady.memory.lent import Lent, come_and_go, is_lent, take_back

DEVICE, POOL = torch.device("cuda", 0), (0, 7)


class Stream:
    """One of CUDA's, as far as it is asked: which others it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waits.append(other.name)


class Device:
    """Streams of threads, and pools in use."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.default = Stream("default")
        self.current = threading.local()
        self.pools: list[Any] = []
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", self.use)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        for name, call in (
            ("_cuda_beginAllocateCurrentThreadToPool", lambda *it: self.pools.append(it)),
            ("_cuda_endAllocateToPool", lambda *it: self.pools.remove(it)),
            ("_cuda_releasePool", lambda *it: None),
        ):
            monkeypatch.setattr(torch._C, name, call, raising=False)

    @property
    def stream(self) -> Stream:
        return getattr(self.current, "stream", self.default)

    def use(self, stream: Stream) -> None:
        self.current.stream = stream


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    yield Device(monkeypatch)
    assert not is_lent()


def lent(captures: Stream) -> Lent:
    return Lent(DEVICE, POOL, captures)  # type: ignore[arg-type]


def test_a_thread_has_its_stream_back(device: Device) -> None:
    captures, mine = Stream("captures"), Stream("mine")
    device.use(mine)
    one = lent(captures)
    assert is_lent()
    assert device.stream is captures
    assert captures.waits == ["mine"]
    assert device.pools == [(0, POOL)]
    assert one.end()
    assert device.stream is mine
    assert mine.waits == ["captures"]
    assert device.pools == []
    assert not one.end()


def test_a_thread_that_has_left_a_block_keeps_its_stream(device: Device) -> None:
    """An error has ended a step in a block of a stream of the user's."""
    captures, block = Stream("captures"), Stream("block")
    device.use(block)
    one = lent(captures)
    device.use(device.default)
    assert one.end()
    assert device.stream is device.default
    assert device.default.waits == block.waits == ["captures"]


def test_another_thread_ends_it_without_a_stream(device: Device) -> None:
    captures, found = Stream("captures"), list[bool]()
    one = lent(captures)
    thread = threading.Thread(target=lambda: found.append(one.end()))
    thread.start()
    thread.join()
    assert found == [False]
    assert device.pools == []
    assert device.stream is captures


def test_what_nobody_took_back_is_ended(device: Device) -> None:
    one = lent(Stream("captures"))
    take_back()
    assert device.stream is device.default
    assert not one.end()
    take_back()


def test_blocks_come_and_go_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    held, seen = [0], list[int]()
    empty = torch.empty

    class Block:
        def __init__(self, nbytes: int) -> None:
            self.nbytes = nbytes
            held[0] += nbytes
            seen.append(held[0])

        def __del__(self) -> None:
            held[0] -= self.nbytes

    monkeypatch.setattr(torch, "empty", lambda nbytes, **_: Block(nbytes))
    come_and_go([(0, 5), (1, 7), (0, 0), (2, 1), (1, 0), (2, 0)], torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", empty)
    assert seen == [5, 12, 8]
    assert held == [0]
