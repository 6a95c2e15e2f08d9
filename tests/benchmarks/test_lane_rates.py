"""How fast the copies of a recorded iteration were."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from belady.ir.timeline import Lane, Span
from benchmarks.copies import lane_rates
from tests.support.builder import OpSpec, build_trace

MIB = 1 << 20


def test_only_whole_copies_of_large_values_count() -> None:
    trace = build_trace([OpSpec(nbytes=8 * MIB), OpSpec(nbytes=16 * MIB), OpSpec(nbytes=MIB)])
    of = {_nbytes(trace, value): value for value in range(len(trace.values))}
    large, larger, small = of[8 * MIB], of[16 * MIB], of[MIB]
    spans = [
        Span(Lane.COPY_OUT, 0.0, 2.0, value=large),
        Span(Lane.COPY_OUT, 2.0, 4.0, value=larger),
        Span(Lane.COPY_OUT, 4.0, 5.0, value=small),
        # In two pieces, as through staging.
        Span(Lane.COPY_IN, 5.0, 6.0, value=large),
        Span(Lane.COPY_IN, 6.0, 7.0, value=large),
        Span(Lane.COPY_IN, 7.0, 8.0, value=larger),
        Span(Lane.COMPUTE, 0.0, 1.0, op=1),
    ]
    found = {rate["lane"]: rate for rate in lane_rates(run_of(trace), spans)}
    rates = sorted(_nbytes(trace, value) / 2.0 for value in (large, larger))
    assert found[Lane.COPY_OUT]["copies"] == 2
    assert found[Lane.COPY_OUT]["slowest"] == rates[0]
    assert found[Lane.COPY_OUT]["bytes_per_s"] == sum(rates) / 2
    assert found[Lane.COPY_IN]["copies"] == 1
    assert found[Lane.COPY_IN]["slowest"] == _nbytes(trace, larger)
    assert Lane.COMPUTE not in found


def run_of(trace: Any) -> Any:
    return SimpleNamespace(trace=trace)


def _nbytes(trace: Any, value: int) -> int:
    nbytes: int = trace.storages[trace.values[value].storage].nbytes
    return nbytes
