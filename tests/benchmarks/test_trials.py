"""When a trial of a cap may end."""

import pytest

from benchmarks.trials import Calm


class _Session:
    """Iterations of which some verify a plan, as is known when the next has ended."""

    def __init__(self, verifying: str) -> None:
        self._verifying = verifying
        self.ended = 0

    def verifies(self, iteration: int) -> bool:
        return iteration < self.ended - 1 and self._verifying[iteration] == "v"


@pytest.mark.parametrize(
    ("verifying", "retries", "ends"),
    [
        ("---vv--", "0000000", 6),  # one after, as only then it is known
        ("---vv--", "5550000", 6),  # before it was verified
        ("---vvv-", "0001000", 7),  # the first that was calm does not count
        ("---v-v-", "0000000", None),  # not of one plan
        ("---vv--", "0000100", None),
        ("-------", "0000000", None),  # a peer
    ],
)
def test_a_trial_ends_once_a_plan_kept_to_the_cap(
    verifying: str, retries: str, ends: int | None
) -> None:
    session, total = _Session(verifying), 0
    calm = Calm(session, lambda: total)  # type: ignore[arg-type]
    found = None
    for number, more in enumerate(retries, 1):
        total += int(more)
        session.ended = number
        if calm() and found is None:
            found = number
    assert found == ends


def test_without_an_allocator_that_keeps_to_a_cap_it_goes_on() -> None:
    session = _Session("vvvv")
    calm = Calm(session, None)  # type: ignore[arg-type]
    for number in range(1, 5):
        session.ended = number
        assert not calm()
