"""Whether a method passes a cap."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from itertools import groupby, pairwise

import belady
from belady.measure.stages import Stage
from belady.units import format_bytes, format_seconds
from benchmarks.measure import kept, settled_peak
from benchmarks.memory import retries_so_far, starved, tidy, too_little
from benchmarks.methods import Opener, Session
from benchmarks.smallest import Failure
from benchmarks.workloads import Workload

STEADY = 4  # iterations in which a cap must hold without a retry
_CALM = 2  # as many that verify a plan of ours


class Calm:
    """Whether a plan was seen to keep to a cap, and none under which the cache was flushed.

    Ours then tries whether others are faster, and goes on with the best of them. A trial does not
    wait for that: should another run out of memory, the measurement that follows says so. But one
    that was seen to flush may be the best all the same: then the iterations that follow decide.

    Parameters
    ----------
    retries
        Counts those of torch's allocator; None where there is none that keeps to a cap.

    Attributes
    ----------
    seen
        Whether it was.
    """

    def __init__(self, session: Session, retries: Callable[[], int] | None) -> None:
        self.seen = False
        self._session = session
        self._retries = retries
        self._counts = [] if retries is None else [retries()]

    def __call__(self) -> bool:
        """Ask after each iteration."""
        if self._retries is not None:
            self._counts.append(self._retries())
            # Of each plan what its verifying iterations flushed, the last of them last.
            plans = [run for verifies, run in self._runs() if verifies]
            ends = list(self._session.phases()[-_CALM:]) == [Stage.VERIFYING.value] * _CALM
            self.seen = ends and not any(any(run[-_CALM:]) for run in plans)
        return self.seen

    def _runs(self) -> Iterator[tuple[bool, list[int]]]:
        """How often the cache was flushed in iterations in a row that verify, or that do not."""
        flushes = (after - before for before, after in pairwise(self._counts))
        phases = zip(self._session.phases(), flushes, strict=False)
        for verifies, run in groupby(phases, lambda it: it[0] == Stage.VERIFYING.value):
            yield verifies, [flushed for _, flushed in run]


def trial(work: Workload, opener: Opener, cap: int) -> Failure | None:
    """Why the method does not pass ``cap``, or None; told as it goes, as a search takes minutes."""
    begun = time.perf_counter()
    failed = _failure(work, opener, cap)
    took, why = format_seconds(time.perf_counter() - begun), failed and failed.why
    print(f"cap of {format_bytes(cap)}: {why or 'passes'}, {took}", file=sys.stderr, flush=True)
    return failed


def _failure(work: Workload, opener: Opener, cap: int) -> Failure | None:
    try:
        with opener(cap) as it:
            calm = Calm(it, retries_so_far if work.setting.device == "cuda" else None)
            it.warm_up(calm)
            record = {} if calm.seen else settled_peak(it, STEADY)
    except Exception as error:
        if not too_little(error):
            raise
        tidy(work, error)
        if isinstance(error, belady.InfeasibleBudgetError):
            least = error.smallest_bytes
            return Failure(f"infeasible below {least}", least)
        return Failure("out of memory" if starved(error) else "a replay came out otherwise")
    tidy(work)
    if calm.seen or kept(record, cap):
        return None
    retries = record.get("allocation_retries")
    return Failure(
        f"{retries} retries" if retries else f"a peak of {record['peak_allocated_bytes']}"
    )
