"""When a trial of a cap may end, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import trials
from benchmarks.methods import Session, opened
from benchmarks.trials import Calm
from benchmarks.workloads import WORKLOADS, Setting

# Of `_Session.told`: of a peer nothing is.
_PEER = ""


class _Session(Session):
    """Iterations whose phases are told some iterations late, and of which one may fail."""

    def __init__(self, told: str, late: int = 1, fails: int = 1000) -> None:
        super().__init__(_work(), None, lambda count: count >= 20, dict)  # type: ignore[arg-type]
        self.__dict__.update(told=told, late=late, fails=fails, ended=0, phases=self._phases)

    def iterate(self, count: int) -> list[float]:
        self.__dict__["ended"] += count
        if self.__dict__["ended"] >= self.__dict__["fails"]:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return [0.0] * count

    def _phases(self) -> list[str]:
        names = {"-": "observed", "f": "first planned", "v": "verified", "s": "steady"}
        known = self.__dict__["told"][: max(0, self.__dict__["ended"] - self.__dict__["late"])]
        return [names[it] for it in known]


def _work() -> Any:
    optimizer = SimpleNamespace(zero_grad=lambda: None)
    return SimpleNamespace(setting=SimpleNamespace(device="cuda"), optimizer=optimizer)


@pytest.mark.parametrize("late", [1, 2])
@pytest.mark.parametrize(
    ("told", "retries", "ends"),
    [
        ("--fvvsss", "00000000", 5),
        ("--fvvsss", "55500000", 5),  # before it was verified
        ("--fvvsss", "00000500", 5),  # after it
        ("--fvvvss", "00010000", 6),  # the first that was calm does not count
        ("--fvfvss", "00000000", None),  # not of one plan
        ("--fvvsss", "00001000", None),
        ("--fvvsss", "00010000", None),
        (_PEER, "00000000", None),
    ],
)
def test_a_trial_ends_once_a_plan_kept_to_the_cap(
    told: str, retries: str, ends: int | None, late: int
) -> None:
    session, total = _Session(told, late), 0
    calm = Calm(session, lambda: total)
    found = None
    for number, more in enumerate(retries + "0" * late, 1):
        total += int(more)
        session.iterate(1)
        if calm() and found is None:
            found = number
    assert found == (None if ends is None else ends + late)


def test_without_an_allocator_that_keeps_to_a_cap_it_goes_on() -> None:
    session = _Session("vvvv")
    calm = Calm(session, None)
    for _ in range(6):
        session.iterate(1)
        assert not calm()


@pytest.mark.parametrize(
    ("told", "fails", "ended", "said"),
    [
        ("--fvvffffff", 8, 6, None),
        ("--fvvffffff", 5, 5, "out of memory"),
        (_PEER, 1000, 20, "3 retries"),
        (_PEER, 4, 4, "out of memory"),
    ],
)
def test_what_a_trial_says(
    told: str, fails: int, ended: int, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _Session(told, fails=fails)

    @contextmanager
    def opener(_cap: int | None) -> Iterator[Session]:
        yield session

    monkeypatch.setattr(trials, "retries_so_far", lambda: 0)
    monkeypatch.setattr(trials, "tidy", lambda *_: None)
    settled: list[int] = []

    def settled_peak(_session: Session, iterations: int) -> dict[str, int]:
        settled.append(iterations)
        return {"allocation_retries": 3}

    monkeypatch.setattr(trials, "settled_peak", settled_peak)
    failed = trials.trial(session.work, opener, 1 << 30)
    assert (failed and failed.why) == said
    assert session.__dict__["ended"] == ended
    assert bool(settled) == (said == "3 retries")


@pytest.mark.parametrize("method", ["belady:auto", "belady-graph:auto"])
def test_ours_tells_which_iterations_verified_a_plan(method: str) -> None:
    work = WORKLOADS["alexnet"].make(Setting("fp32", device="cpu"), {}, True, 0)
    with opened(work, method) as opener, opener(1 << 40) as it:
        calm = Calm(it, lambda: 0)
        it.warm_up(calm)
        assert calm.seen
        assert list(it.phases())[-2:] == ["verified"] * 2


def test_a_budget_that_is_too_small_says_what_would_do() -> None:
    work = WORKLOADS["alexnet"].make(Setting("fp32", device="cpu"), {}, True, 0)
    with opened(work, "belady:auto") as opener:
        failed = trials.trial(work, opener, 100_000)
    assert failed is not None
    assert failed.least_bytes > 100_000
