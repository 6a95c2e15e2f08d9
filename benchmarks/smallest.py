"""The smallest cap that a method passes, by bisection."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

TOLERANCE = 0.02
# How much more than would do a method may state (`belady.sections.choice`: all but a tenth).
_STATED = 1.1
# How often a cap that should have passed is enlarged by half before giving up.
_GROWTHS = 4


@dataclass(frozen=True)
class Failure:
    """Why a cap failed, and the smallest cap that the method says it would do with; 0: unsaid."""

    why: str
    least_bytes: int = 0


Attempt = Callable[[int], Failure | None]


@dataclass(frozen=True)
class Trial:
    """One cap that was tried, and why it failed."""

    cap_bytes: int
    failed: str | None


@dataclass
class Search:
    """What is known of the caps that a method passes.

    Attributes
    ----------
    low, high
        The largest cap known to fail and the smallest known to pass (0: none yet).
    stated
        A cap that fails as well by what a method states of it; 0: none.
    """

    attempt: Attempt
    low: int
    high: int = 0
    stated: int = 0
    trials: list[Trial] = field(default_factory=list)

    @property
    def failing(self) -> int:
        """The largest cap that fails for all that is known; what has passed refutes statements."""
        refuted = self.high and self.stated >= self.high
        return self.low if refuted else max(self.low, self.stated)

    def passes(self, cap: int) -> bool:
        """Try a cap, unless the answer is known already; then what a method says would do."""
        if cap <= self.low:
            return False
        if self.high and cap >= self.high:
            return True
        failed = self.attempt(cap)
        self.trials.append(Trial(cap, failed and failed.why))
        if failed is None:
            self.high = cap
            return True
        self.low, least = cap, failed.least_bytes
        self.stated = max(self.stated, int(least / _STATED))
        # What a failure states is no news twice.
        if least > cap and least not in [trial.cap_bytes for trial in self.trials]:
            self.passes(least)
        return False


def smallest_cap(attempt: Attempt, low: int, high: int, guesses: Iterable[int] = ()) -> Search:
    """Bisect to within `TOLERANCE`.

    Parameters
    ----------
    attempt
        Tries a cap; gives why it fails, or None.
    low
        A cap known to fail: what the workload holds between iterations.
    high
        A cap expected to pass. Where it does not, larger ones are tried.
    guesses
        Caps near which the answer probably lies, tried first.

    Returns
    -------
    Search
        Its ``high`` is the smallest cap that passed; 0 if none did.
    """
    search = Search(attempt, low)
    for guess in guesses:
        search.passes(guess)
    for _ in range(_GROWTHS):
        if search.high or search.passes(high):
            break
        high = high * 3 // 2
    while search.high and _apart(search.low, search.high):
        lower = search.failing
        # In the end what was stated is tried: a method can be wrong about itself.
        search.passes((lower + search.high) // 2 if _apart(lower, search.high) else lower)
    return search


def _apart(low: int, high: int) -> bool:
    return high - low > max(1, TOLERANCE * high)
