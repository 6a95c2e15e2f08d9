"""How fast the copies of a recorded iteration were. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from belady.ir.run import Run
from belady.ir.timeline import Lane, Span
from benchmarks.cases import Record

# From here on a copy takes as long as its bytes need; smaller ones are latency as well.
_LARGE = 4 << 20


def lane_rates(run: Run, spans: Iterable[Span]) -> list[Record]:
    """Rates of the recorded copies of whole values of at least 4 MiB, by lane."""
    seconds: dict[tuple[Lane, int], list[float]] = {}
    for span in spans:
        if span.value >= 0:
            seconds.setdefault((span.lane, span.value), []).append(span.end_s - span.start_s)
    rates: dict[Lane, list[float]] = {}
    for (lane, value), times in seconds.items():
        nbytes = run.trace.storages[run.trace.values[value].storage].nbytes
        # What goes to disk by way of the host does so in pieces.
        if len(times) == 1 and nbytes >= _LARGE and times[0] > 0:
            rates.setdefault(lane, []).append(nbytes / times[0])
    return [
        {"lane": lane, "copies": len(of), "bytes_per_s": statistics.median(of), "slowest": min(of)}
        for lane, of in rates.items()
    ]
