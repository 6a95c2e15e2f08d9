"""Python's collector comes seldom while anybody is inside, and as often as before afterwards."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from belady.ir.collector import Seldom
from tests.support.collector import thresholds

THRESHOLD = (701, 11, 12)


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    with thresholds(*THRESHOLD):
        yield


def test_it_comes_seldom_until_the_last_has_left() -> None:
    seldom = Seldom()
    with seldom():
        assert gc.get_threshold()[0] > 10 * THRESHOLD[0]
        with suppress(ValueError), seldom():
            raise ValueError("wrong")
        assert gc.get_threshold()[0] > 10 * THRESHOLD[0]
        assert gc.isenabled()
    assert gc.get_threshold() == THRESHOLD


def test_threads_leave_it_as_they_found_it() -> None:
    seldom = Seldom()

    def enter() -> None:
        for _ in range(2000):
            with seldom():
                pass

    threads = [threading.Thread(target=enter) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.get_threshold() == THRESHOLD


def test_what_others_set_meanwhile_stays() -> None:
    with Seldom()():
        gc.set_threshold(5, 6, 7)
    assert gc.get_threshold() == (5, 6, 7)


@pytest.mark.parametrize("first", [0, 200_000])
def test_who_has_it_come_more_seldom_is_left_alone(first: int) -> None:
    gc.set_threshold(first, 5, 5)
    with Seldom()():
        assert gc.get_threshold() == (first, 5, 5)
    assert gc.get_threshold() == (first, 5, 5)
