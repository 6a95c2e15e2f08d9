"""For a moment torch may take so many bytes more of a device; then all is as before."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from belady.memory import algorithms
from belady.memory.algorithms import available, beside
from belady.memory.allowance import allowance

MIB = 2**20
TOTAL = 1000 * MIB
RESERVED = 200 * MIB
SOMEWHERE = torch.device("cuda", 0)


class Allocator:
    """Stands for torch's, on a device of `TOTAL` bytes; keeps 100 MiB that nobody uses."""

    def __init__(self) -> None:
        self.fraction = 0.9
        self.reserved = RESERVED + 100 * MIB

    @property
    def nbytes(self) -> int:
        return int(self.fraction * TOTAL)

    def set(self, fraction: float, device: torch.device) -> None:
        assert device == SOMEWHERE
        self.fraction = fraction

    def empty(self) -> None:
        self.reserved = RESERVED


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    it = Allocator()
    properties = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", it.set)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: it.fraction)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: it.reserved)
    monkeypatch.setattr(torch.cuda, "empty_cache", it.empty)
    return it


@pytest.mark.parametrize(
    ("asked", "given"), [(0, 0), (1, 20 * MIB), (20 * MIB, 20 * MIB), (90 * MIB, 100 * MIB)]
)
def test_whole_pages_beyond_what_is_in_use(allocator: Allocator, asked: int, given: int) -> None:
    with allowance(SOMEWHERE, asked):
        assert allocator.nbytes == RESERVED + given
    assert allocator.fraction == 0.9


def test_a_limit_that_was_there_is_never_raised(allocator: Allocator) -> None:
    with allowance(SOMEWHERE, TOTAL):
        assert allocator.fraction == 0.9


def test_an_error_leaves_the_limit_as_it_was(allocator: Allocator) -> None:
    with pytest.raises(KeyboardInterrupt), allowance(SOMEWHERE, MIB):
        raise KeyboardInterrupt
    assert allocator.fraction == 0.9


def test_a_cpu_has_no_limit() -> None:
    with allowance(torch.device("cpu"), 0):
        assert torch.zeros(1000).numel() == 1000


# -- choices beside --------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def flag() -> Iterator[None]:
    before = torch.backends.cudnn.deterministic
    torch.backends.cudnn.deterministic = False
    yield
    assert algorithms._BESIDE.users == 0
    torch.backends.cudnn.deterministic = before


def test_the_last_user_turns_back() -> None:
    one, two = beside(), beside()
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert torch.backends.cudnn.deterministic
    two.__exit__(None, None, None)
    assert not torch.backends.cudnn.deterministic


def test_an_error_turns_back() -> None:
    with pytest.raises(KeyboardInterrupt), beside():
        raise KeyboardInterrupt
    assert not torch.backends.cudnn.deterministic


def test_what_the_user_asked_for_stays() -> None:
    torch.backends.cudnn.deterministic = True
    with beside():
        assert torch.backends.cudnn.deterministic
    assert torch.backends.cudnn.deterministic


def test_choices_are_made_only_where_they_can_be_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert not available(torch.device("cpu"))
    assert available(SOMEWHERE)
    with beside():
        assert available(SOMEWHERE)
    torch.backends.cudnn.deterministic = True
    assert not available(SOMEWHERE)
    torch.backends.cudnn.deterministic = False
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not available(SOMEWHERE)
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert not available(SOMEWHERE)
