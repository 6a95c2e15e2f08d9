"""Verb ``plot``: the frontier of records as a figure.

Each method that was measured is a line; a point is the time of an iteration over the bytes that
torch reserved at the peak (on a CPU: live bytes), hollow where the allocator flushed its cache.
What ran without a cap is at what it allocated, as what it reserved idles in part. The bound is over
the budget.
"""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from belady.planners import POLICIES
from benchmarks import comparison, options, records
from benchmarks.cases import BOUND, OURS, OWN, Record, capped, flushes
from benchmarks.errors import GivenError
from benchmarks.suites import PEER_NAMES

if TYPE_CHECKING:
    from belady.report.plots import Point

_BOUND = "bound (eager, uncut)"
_SLICED = ", in slices"
_AUTO, *_POLICIES = POLICIES
_OURS = (
    *(f"{engine}{_AUTO}{cut}" for engine in OWN for cut in ("", _SLICED)),
    *(f"{OURS}{policy}" for policy in _POLICIES),
)
# Ours and peers have numbers apart.
LOOKS = {name: number for names in (PEER_NAMES, _OURS) for number, name in enumerate(names)}


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
    drawn = points(found)
    save_figure(frontier(drawn, looks=LOOKS), arguments.out, description=described(drawn))
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
    """A point for each measurement; rounds of one case are one point, at their median.

    What ran in slices is a series of its own. The bound is of what does not: where it says that
    nothing fits, and something ran in slices, it is left out.
    """
    from belady.report.plots import Kind, Point

    rounds: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        rounds.setdefault((record["method"], str(record.get("budget"))), []).append(record)
    bounds = [same[0] for (method, _), same in rounds.items() if method == BOUND]
    made = []
    for (method, _), same in rounds.items():
        if method == BOUND:
            continue
        kind = Kind.OURS if method.startswith(OWN) else Kind.PEER
        held = max(map(_held, same))
        seconds = median(r["median_seconds"] for r in same)
        sliced = any("sections" in r.get("numerics", ()) for r in same)
        name = f"{method}{_SLICED}" if sliced else method
        made.append(Point(name, held, seconds, kind, not flushes(same)))
    least = min((it.nbytes for it in made if it.series.endswith(_SLICED)), default=math.inf)
    for record in bounds:
        at, seconds = record["budget_bytes"], record["bound_seconds"]
        if seconds is not None or at < least:
            made.append(Point(_BOUND, at, math.inf if seconds is None else seconds, Kind.BOUND))
    kinds = list(Kind)
    return sorted(made, key=lambda it: (kinds.index(it.kind), LOOKS.get(it.series, len(LOOKS))))


def _held(record: Record) -> int:
    allocated = int(record["peak_allocated_bytes"])
    return int(record.get("peak_reserved_bytes", allocated)) if capped(record) else allocated


def described(drawn: Iterable[Point]) -> str:
    """All that a figure shows, by which a file is compared with the records."""
    return json.dumps(
        [
            [
                it.series,
                it.kind,
                it.nbytes,
                it.seconds if it.seconds < math.inf else None,
                it.passed,
            ]
            for it in drawn
        ]
    )


def description_of(path: Path) -> str | None:
    """What `described` gave when the figure was written; None where it does not say."""
    try:
        tree = ET.parse(path)
    except ET.ParseError:
        return None
    return next((it.text for it in tree.iter() if it.tag.endswith("}description")), None)
