"""When a trial of a cap may end, and what it says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import trials
from benchmarks.methods import Session, opened
from benchmarks.peers import Applied
from benchmarks.trials import Calm
from benchmarks.workloads import WORKLOADS, Setting

# Of a peer nothing is told.
_PEER = ""


_NAMES = {"-": "observed", "f": "first planned", "v": "verified", "s": "steady"}


@dataclass
class _Iterations:
    """Iterations whose phases are told some iterations late, and of which one may fail."""

    told: str
    late: int = 1
    fails: int = 1000
    ended: int = 0

    def phases(self) -> list[str]:
        return [_NAMES[it] for it in self.told[: max(0, self.ended - self.late)]]

    def run(self) -> None:
        self.ended += 1
        if self.ended >= self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory")


@dataclass(frozen=True)
class _Session(Session):
    iterations: _Iterations = field(default_factory=lambda: _Iterations(""))

    def iterate(self, count: int, attempt: Any = None) -> list[float]:
        for _ in range(count):
            self.iterations.run()
        return [0.0] * count


def session_of(iterations: _Iterations) -> Session:
    """A session that is settled after 20 iterations."""
    applied = Applied(nn.Identity())
    told = iterations.phases
    settled = (20).__le__
    return _Session(_work(), applied, settled, dict, None, told, iterations=iterations)


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
        ("--fvvfvvss", "0001000000", None),  # of one that may be the best all the same
        ("--fvvfvvss", "0050000000", 5),
        ("--fvvsss", "00001000", None),
        ("--fvvsss", "00010000", None),
        (_PEER, "00000000", None),
    ],
)
def test_a_trial_ends_once_a_plan_kept_to_the_cap(
    told: str, retries: str, ends: int | None, late: int
) -> None:
    iterations, total = _Iterations(told, late), 0
    calm = Calm(session_of(iterations), lambda: total)
    found = None
    for number, more in enumerate(retries + "0" * late, 1):
        total += int(more)
        iterations.run()
        if calm() and found is None:
            found = number
    assert found == (None if ends is None else ends + late)


def test_without_an_allocator_that_keeps_to_a_cap_it_goes_on() -> None:
    iterations = _Iterations("vvvv")
    calm = Calm(session_of(iterations), None)
    for _ in range(6):
        iterations.run()
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
    iterations = _Iterations(told, fails=fails)
    session = session_of(iterations)

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
    assert iterations.ended == ended
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


@pytest.mark.parametrize("method", ["belady:auto", "belady-graph:auto", "checkpoint"])
def test_only_ours_goes_back_while_it_is_warmed_up(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WORKLOADS["alexnet"].make(Setting("fp32", device="cpu"), {}, True, 0)
    runs, backward = 0, torch.Tensor.backward

    def fails(self: torch.Tensor) -> None:
        nonlocal runs
        runs += 1
        if runs in (4, 5):
            raise torch.OutOfMemoryError("CUDA out of memory")
        backward(self)

    with opened(work, method) as opener, opener(1 << 40) as it:
        monkeypatch.setattr(torch.Tensor, "backward", fails)
        if not method.startswith("belady"):
            with pytest.raises(torch.OutOfMemoryError):
                it.warm_up()
            return
        found = it.warm_up()
        assert runs == found["warm_up"] + 2
        runs = 3
        with pytest.raises(torch.OutOfMemoryError):
            it.iterate(1)
