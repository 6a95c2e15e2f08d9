"""The bisection of caps."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.smallest import TOLERANCE, smallest_cap

BYTES = st.integers(1, 10**12)


@given(needed=BYTES, low=BYTES, guesses=st.lists(BYTES, max_size=3))
def test_finds_the_smallest_to_within_the_tolerance(
    needed: int, low: int, guesses: list[int]
) -> None:
    low = min(low, needed - 1)
    found = smallest_cap(
        lambda cap: None if cap >= needed else "too small", low, 2 * needed, guesses
    )
    assert needed <= found.high <= max(needed, found.low / (1 - TOLERANCE) + 1)
    assert found.low < needed


@given(needed=BYTES)
def test_a_high_end_that_fails_is_raised(needed: int) -> None:
    found = smallest_cap(lambda cap: None if cap >= 3 * needed else "too small", 0, 2 * needed)
    assert 3 * needed <= found.high


def test_no_cap_passes() -> None:
    found = smallest_cap(lambda _: "never", 0, 100)
    assert found.high == 0
    assert all(trial.failed for trial in found.trials)
