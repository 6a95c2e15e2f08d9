"""Interrupts that arrive where Python ignores exceptions."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import belady
from belady.interrupts import KeptInterrupts

LONG_S = 20.0


@pytest.fixture(autouse=True)
def ignored() -> Iterator[list[Any]]:
    """Types of what Python ignored, told to the hook that lies below ours."""
    found: list[Any] = []
    hook, handler = sys.unraisablehook, signal.getsignal(signal.SIGINT)
    sys.unraisablehook = lambda told: found.append(told.exc_type)
    # A process in the background of a shell has it ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield found
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)


class Ends:
    """Something happens in its destructor."""

    def __init__(self, happens: Callable[[], object]) -> None:
        self.happens = happens

    def __del__(self) -> None:
        self.happens()


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def fail() -> None:
    raise ValueError


def end(happens: Callable[[], object], times: int = 1) -> None:
    for _ in range(times):
        Ends(happens)


def interrupted(times: int = 1) -> None:
    end(interrupt, times)
    time.sleep(LONG_S)  # which it wakes


@pytest.mark.parametrize("times", [1, 3])
def test_an_interrupt_in_a_destructor_comes_after_it(times: int, ignored: list[Any]) -> None:
    kept = KeptInterrupts()
    with pytest.raises(KeyboardInterrupt):
        interrupted(times)
    kept.close()
    assert KeyboardInterrupt not in ignored


def test_whoever_trains_with_belady_is_interrupted(ignored: list[Any]) -> None:
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), belady.virtualize(torch.nn.Linear(2, 2), "1GiB"):
        interrupted()
    assert KeyboardInterrupt not in ignored
    assert sys.unraisablehook is before


def test_other_exceptions_are_ignored_as_before(ignored: list[Any]) -> None:
    kept = KeptInterrupts()
    end(fail)
    kept.close()
    assert ignored == [ValueError]


def test_only_the_main_thread_is_interrupted(ignored: list[Any]) -> None:
    def raised() -> None:
        raise KeyboardInterrupt

    kept = KeptInterrupts()
    thread = threading.Thread(target=end, args=(raised,))
    thread.start()
    thread.join()
    kept.close()
    assert ignored == [KeyboardInterrupt]


def test_without_room_for_a_thread_it_is_ignored_as_before(
    ignored: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("belady.interrupts.start_new_thread", none)
    kept = KeptInterrupts()
    end(interrupt)
    kept.close()
    assert ignored == [KeyboardInterrupt]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_the_hook_before_is_back_whatever_the_order_of_closing(
    order: tuple[int, int], ignored: list[Any]
) -> None:
    before = sys.unraisablehook
    kept = KeptInterrupts(), KeptInterrupts()
    kept[order[0]].close()
    assert sys.unraisablehook is not before
    kept[order[1]].close()
    assert sys.unraisablehook is before
    end(interrupt)
    assert ignored == [KeyboardInterrupt]


def test_a_hook_of_somebody_else_is_left_alone(ignored: list[Any]) -> None:
    kept = KeptInterrupts()
    ours = sys.unraisablehook
    sys.unraisablehook = theirs = lambda told: ours(told)
    kept.close()
    assert sys.unraisablehook is theirs
    end(interrupt)
    assert ignored == [KeyboardInterrupt]
