"""Verb ``plot``: the frontier of records as a figure.

Each method that was measured is a line; a point is the time of an iteration over the bytes that
torch reserved at the peak (on a CPU: live bytes). The bound is over the budget.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from statistics import median
from typing import TYPE_CHECKING

from benchmarks import options, records
from benchmarks.cases import BOUND, OWN, Record

if TYPE_CHECKING:
    from belady.report.plots import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("files", type=options.existing, nargs="+", help="JSON lines")
    parser.add_argument(
        "-o", "--out", type=options.figure, required=True, help="ends in .svg or .png"
    )
    parser.add_argument("--workload", help="needed where the records are of several")
    parser.add_argument("--precision", help="likewise")


def run(arguments: argparse.Namespace) -> int:
    """Draw the records of one workload."""
    from belady.report.plots import frontier, save_figure

    found = [
        record
        for record in records.merge(arguments.files)
        if record["outcome"] == "ok"
        and arguments.workload in (None, record["workload"])
        and arguments.precision in (None, record.get("precision"))
    ]
    kinds = {(r["workload"], r.get("precision"), r.get("channels_last")) for r in found}
    if len(kinds) != 1:
        print(f"records of one workload make a figure; these are of {len(kinds)}: {sorted(kinds)}")
        return 2
    save_figure(frontier(points(found)), arguments.out)
    return 0


def points(found: Iterable[Record]) -> list[Point]:
    """A point for each measurement; rounds of one case are one point, at their median."""
    from belady.report.plots import Kind, Point

    rounds: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        rounds.setdefault((record["method"], str(record.get("budget"))), []).append(record)
    made = []
    for (method, _), same in rounds.items():
        if method == BOUND:
            seconds = same[0]["bound_seconds"]
            at = same[0]["budget_bytes"]
            made.append(Point("bound", at, math.inf if seconds is None else seconds, Kind.BOUND))
            continue
        kind = Kind.OURS if method.startswith(OWN) else Kind.PEER
        held = max(r.get("peak_reserved_bytes", r["peak_allocated_bytes"]) for r in same)
        made.append(Point(method, held, median(r["median_seconds"] for r in same), kind))
    return made
