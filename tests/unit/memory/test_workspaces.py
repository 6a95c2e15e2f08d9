"""cuBLAS's workspaces go where memory begins, so that what is set aside after them is one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from belady.memory.cap import enforce, make_room
from belady.memory.lanes import resolve

pytestmark = pytest.mark.gpu

MIB = 2**20
BUDGET, ROOM = 768 * MIB, 400 * MIB


@pytest.fixture
def device() -> Iterator[torch.device]:
    device = resolve("cuda")
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


def test_nothing_is_taken_where_nothing_was_multiplied(device: torch.device) -> None:
    before = torch.cuda.memory_allocated(device)
    make_room(device, torch.cuda.memory_reserved(device))
    assert torch.cuda.memory_allocated(device) == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_in_any_mode_products_stay_right(mode: Any, device: torch.device) -> None:
    products(device)
    some = torch.randn(128, 128, device=device)
    expected = some @ some
    with mode():
        make_room(device, torch.cuda.memory_reserved(device) + ROOM)
    assert torch.equal(some @ some, expected)
