"""cuBLAS's workspaces go where memory begins, so that what is set aside after them is one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from belady.memory import workspaces
from belady.memory.cap import enforce, make_room
from belady.memory.lanes import resolve
from belady.memory.launches import Launches
from belady.simulate.holes import Holes

MIB = 2**20
BUDGET, ROOM = 768 * MIB, 400 * MIB


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    device = resolve("cuda")
    monkeypatch.setattr(workspaces, "_GIVEN_UP", {})
    torch._C._cuda_clearCublasWorkspaces()
    undo = enforce(device, torch.cuda.memory_reserved(device) + BUDGET)
    yield device
    torch._C._cuda_clearCublasWorkspaces()
    undo()
    torch.cuda.empty_cache()


def products(device: torch.device) -> int:
    """Multiply, forward and backward, where memory has begun with something else; the bytes kept.

    A stream and its stretch of memory are new to this test.
    """
    before = torch.cuda.memory_allocated(device)
    first = torch.empty(240 * MIB, dtype=torch.uint8, device=device)
    weight = torch.ones(64, 64, device=device, requires_grad=True)
    (torch.ones(64, 64, device=device) @ weight).sum().backward()
    del first, weight
    return torch.cuda.memory_allocated(device) - before


def stretches(stream: int) -> list[dict[str, Any]]:
    """Mapped memory of a stream's large blocks, by address."""
    found = [
        it
        for it in torch.cuda.memory_snapshot()
        if it["stream"] == stream and it["segment_type"] == "large"
    ]
    return sorted(found, key=lambda it: it["address"])


@pytest.mark.gpu
def test_memory_after_them_is_one_piece(device: torch.device) -> None:
    with torch.cuda.stream(torch.cuda.Stream(device)) as _:
        stream = torch.cuda.current_stream(device).cuda_stream
        kept = products(device)
        assert kept > MIB
        make_room(device, torch.cuda.memory_reserved(device) + ROOM)
        (stretch,) = stretches(stream)
        blocks = [(it["size"], it["state"]) for it in stretch["blocks"] if it["size"] >= MIB]
        states = [state for _, state in blocks]
        assert states == sorted(states), "used ones come first: " + str(blocks)
        used = sum(size for size, state in blocks if state == "active_allocated")
        # Both are back at once, so that no later product takes memory elsewhere.
        assert used == kept
        assert products(device) == 0


@pytest.mark.gpu
def test_nothing_is_taken_where_nothing_was_multiplied(device: torch.device) -> None:
    before = torch.cuda.memory_allocated(device)
    make_room(device, torch.cuda.memory_reserved(device))
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_any_mode_products_stay_right(mode: Any, device: torch.device) -> None:
    products(device)
    some = torch.randn(128, 128, device=device)
    expected = some @ some
    with mode():
        make_room(device, torch.cuda.memory_reserved(device) + ROOM)
    assert torch.equal(some @ some, expected)


@pytest.mark.gpu
def test_what_was_given_up_for_a_capture_is_back_first(device: torch.device) -> None:
    with torch.cuda.stream(torch.cuda.Stream(device)) as _:
        kept = products(device)
        before = torch.cuda.memory_allocated(device)
        launches = Launches(device)
        launches.over()
        assert torch.cuda.memory_allocated(device) == before - kept
        make_room(device, torch.cuda.memory_reserved(device) + ROOM)
        assert torch.cuda.memory_allocated(device) == before
        assert products(device) == 0


class Device:
    """Workspaces of two threads: that which calls, and that of autograd."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *had: str) -> None:
        self.had, self.device = [*had], torch.device("cuda", 0)
        self.forgotten = False
        monkeypatch.setattr(workspaces, "_GIVEN_UP", {})
        monkeypatch.setattr(workspaces, "others_have_pools", lambda _: False)
        monkeypatch.setattr(workspaces, "_multiply", lambda _: self.had.append("caller"))
        monkeypatch.setattr(workspaces, "in_backward", lambda *_: self.had.append("autograd"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 32 * MIB * len(self.had))
        clear = self.had.clear
        monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)

    def put_first(self) -> list[str]:
        workspaces.put_first(self.device, self._forget)
        assert self.forgotten
        return self.had

    def _forget(self) -> None:
        assert not self.had
        self.forgotten = True


@pytest.mark.parametrize("had", [(), ("caller",), ("caller", "autograd")], ids=len)
@pytest.mark.parametrize("again", [0, 1, 2])
def test_as_many_come_back_as_there_were(
    had: tuple[str, ...], again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on = Device(monkeypatch, *had)
    # A capture gives up those before it, and its own.
    for taken in range(again):
        workspaces.give_up(on.device)
        assert not on.had
        on.had += [*had[: 1 - taken]]
    assert on.put_first() == [*had]
    on.had.clear()
    # What came back is not remembered.
    assert on.put_first() == []


@pytest.mark.parametrize("had", [(), ("caller",), ("caller", "autograd")], ids=len)
def test_a_capture_takes_as_many_and_they_still_come_back(
    had: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    on = Device(monkeypatch, *had)
    workspaces.give_up(on.device)
    workspaces.take_for_capture(on.device)
    assert on.had == [*had]
    # With the end of the capture they go.
    workspaces.give_up(on.device)
    assert on.put_first() == [*had]


@pytest.mark.gpu
@pytest.mark.parametrize("holes", [None, ()])
def test_a_capture_begins_with_them(holes: Holes | None, device: torch.device) -> None:
    with torch.cuda.stream(torch.cuda.Stream(device)) as _:
        kept = products(device)
        launches = Launches(device, holes, torch.cuda.memory_reserved(device) + ROOM)

        def issue() -> tuple[int, int]:
            before = torch.cuda.memory_allocated(device)
            launches.divide()
            return torch.cuda.memory_allocated(device) - before, products(device)

        _, (taken, more) = launches.capture(issue)
        launches.over()
        assert (taken, more) == (kept, 0)
