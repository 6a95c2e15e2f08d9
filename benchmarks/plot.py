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

from benchmarks import comparison, options, records
from benchmarks.cases import BOUND, OWN, Record
from benchmarks.errors import GivenError

if TYPE_CHECKING:
    from belady.report.plots import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("files", type=options.existing, nargs="+", help="JSON lines")
    parser.add_argument(
        "-o", "--out", type=options.figure, required=True, help="ends in .svg or .png"
    )
    parser.add_argument(
        "--workload", type=options.workload, help="needed where the records are of several"
    )
    parser.add_argument("--precision", choices=("fp32", "tf32", "bf16"), help="likewise")
    parser.add_argument("--setting", help="likewise: one of those that are named where it lacks")


def run(arguments: argparse.Namespace) -> int:
    """Draw the records of one setting."""
    from belady.report.plots import frontier, save_figure

    found = _chosen(records.merge(arguments.files), arguments)
    save_figure(frontier(points(found)), arguments.out)
    return 0


def _chosen(found: Iterable[Record], arguments: argparse.Namespace) -> list[Record]:
    """The records of the one setting that the options leave."""
    wanted = [
        record
        for record in found
        if record.get("outcome") == "ok"
        and arguments.workload in (None, record["workload"])
        and arguments.precision in (None, record.get("precision"))
    ]
    of = dict(comparison.settings(wanted))
    chosen = {arguments.setting} if arguments.setting else set(of)
    if len(chosen & of.keys()) != 1:
        there = "".join(f"\n  {title!r}" for title in of)
        raise GivenError(f"--setting says which of {len(of)} settings makes the figure:{there}")
    return of[chosen.pop()]


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
