"""A record in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from belady.units import format_bytes, format_seconds
from benchmarks.cases import Record

# Titles, entries of a record, and how they are written.
_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("", "median_seconds", format_seconds),
    ("in a row", "pipelined_seconds", format_seconds),
    ("predicted", "predicted_seconds", format_seconds),
    ("bound", "bound_seconds", format_seconds),
    ("kernels", "kernel_seconds", format_seconds),
    ("host", "host_seconds", format_seconds),
    ("stall", "stall_seconds", format_seconds),
    ("stall predicted", "predicted_stall_seconds", format_seconds),
    ("peak", "peak_allocated_bytes", format_bytes),
    ("peak predicted", "predicted_peak_bytes", format_bytes),
    ("reserved", "peak_reserved_bytes", format_bytes),
    ("budget", "budget_bytes", format_bytes),
    ("retries", "allocation_retries", str),
    ("by", "planner", str),
    ("values moved", "moved_values", str),
    ("warm-up", "warm_up", str),
    ("equal", "equal", str),
    ("all of it", "wall_seconds", format_seconds),
)


def line(record: Record) -> str:
    """A record in one line, for whoever looks on: what is known of it."""
    words = [str(record.get(k)) for k in ("workload", "method", "budget", "precision", "outcome")]
    facts = [
        f"{title} {form(record[name])}".strip()
        for title, name, form in _SHOWN
        if record.get(name) is not None
    ]
    error = str(record.get("error", "")).strip().rpartition("\n")[2]
    return f"{' '.join(words)}: {', '.join([*facts, *([error] if error else [])])}"
