"""The bisection of caps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.smallest import TOLERANCE, Failure, smallest_cap

BYTES = st.integers(1, 10**12)
TOO_SMALL = Failure("too small")


@given(needed=BYTES, low=BYTES, guesses=st.lists(BYTES, max_size=3))
def test_finds_the_smallest_to_within_the_tolerance(
    needed: int, low: int, guesses: list[int]
) -> None:
    low = min(low, needed - 1)
    found = smallest_cap(lambda cap: None if cap >= needed else TOO_SMALL, low, 2 * needed, guesses)
    assert needed <= found.high <= max(needed, found.low / (1 - TOLERANCE) + 1)
    assert found.low < needed


@given(needed=BYTES)
def test_a_high_end_that_fails_is_raised(needed: int) -> None:
    found = smallest_cap(lambda cap: None if cap >= 3 * needed else TOO_SMALL, 0, 2 * needed)
    assert 3 * needed <= found.high


def test_no_cap_passes() -> None:
    found = smallest_cap(lambda _: Failure("never"), 0, 100)
    assert found.high == 0
    assert all(trial.failed for trial in found.trials)


@given(
    needed=BYTES,
    low=BYTES,
    guesses=st.lists(BYTES, max_size=3),
    stated=st.floats(1.0, 1.1, exclude_max=True),
)
def test_what_a_method_states_is_found_too(
    needed: int, low: int, guesses: list[int], stated: float
) -> None:
    low = min(low, needed - 1)
    refusal = Failure("too small", int(stated * needed))
    found = smallest_cap(lambda cap: None if cap >= needed else refusal, low, 2 * needed, guesses)
    assert needed <= found.high <= max(needed, found.low / (1 - TOLERANCE) + 1)
    assert found.low < needed


@pytest.mark.parametrize("stated", [1_234_567, 1_300_000])
def test_what_a_method_states_is_tried_next_and_narrows_the_search(stated: int) -> None:
    refusal = Failure("too small", stated)
    found = smallest_cap(lambda cap: None if cap >= 1_234_567 else refusal, 10_000, 8_000_000)
    caps = [trial.cap_bytes for trial in found.trials]
    first = next(at for at, trial in enumerate(found.trials) if trial.failed)
    assert caps[first + 1] == stated
    assert all(int(stated / 1.1) <= cap <= stated for cap in caps[first + 2 :])
    # What was stated to fail is tried once, at the end.
    assert caps.count(int(stated / 1.1)) <= 1


def test_what_a_method_states_and_does_not_keep_is_tried_once() -> None:
    needed = 1000

    def attempt(cap: int) -> Failure | None:
        return None if cap >= needed else Failure("too small", 800)

    found = smallest_cap(attempt, 0, 4 * needed, [100])
    assert needed <= found.high <= 1.03 * needed
    caps = [trial.cap_bytes for trial in found.trials]
    assert caps.count(800) == 1
    assert len(caps) == len(set(caps))


@pytest.mark.parametrize("stated", [2000, 2150, 5500])
@pytest.mark.parametrize("guesses", [[], [2000]])
def test_what_a_method_states_too_high_is_found_out(stated: int, guesses: list[int]) -> None:
    needed = 1100
    refusal = Failure("too small", stated)
    found = smallest_cap(lambda cap: None if cap >= needed else refusal, 0, 1000, guesses)
    assert needed <= found.high <= 1.03 * needed
    assert found.low < needed
    caps = [trial.cap_bytes for trial in found.trials]
    assert len(caps) == len(set(caps)) < 15
