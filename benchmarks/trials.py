"""Whether a method passes a cap."""

from __future__ import annotations

import sys
import time

import belady
from belady.units import format_bytes, format_seconds
from benchmarks.measure import kept, settled_peak
from benchmarks.methods import Opener, starved, tidy, too_little
from benchmarks.smallest import Failure
from benchmarks.workloads import Workload

STEADY = 4  # iterations in which a cap must hold without a retry


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
            it.warm_up()
            record = settled_peak(it, STEADY)
    except Exception as error:
        if not too_little(error):
            raise
        tidy(work, error)
        if isinstance(error, belady.InfeasibleBudgetError):
            least = error.smallest_bytes
            return Failure(f"infeasible below {least}", least)
        return Failure("out of memory" if starved(error) else "a replay came out otherwise")
    tidy(work)
    if kept(record, cap):
        return None
    retries = record.get("allocation_retries")
    return Failure(
        f"{retries} retries" if retries else f"a peak of {record['peak_allocated_bytes']}"
    )
