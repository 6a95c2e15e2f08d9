"""``belady simulate``: predict what a plan does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from belady.cli.inputs import read
from belady.cli.machine import hardware_for
from belady.cli.options import HardwareOption, JsonOption, TraceArgument
from belady.cli.show import show_document, show_table
from belady.ir.plan import Plan
from belady.ir.timeline import Timeline
from belady.ir.trace import Trace
from belady.units import format_bytes, format_seconds


def simulate(
    trace: TraceArgument,
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="What `belady plan -o` wrote.")],
    hardware: HardwareOption = None,
    json: JsonOption = False,
) -> None:
    """Predict time, peaks and stalls of PLAN on TRACE."""
    from belady import simulate as simulation

    document = read(Trace, trace)
    decided = read(Plan, plan)
    profile = hardware_for(document.device, hardware)
    timeline = simulation.simulate(document, profile, decided)
    if json:
        show_document(timeline)
    else:
        show_table("Predicted iteration", ("what", "value"), _rows(document, timeline))


def _rows(trace: Trace, timeline: Timeline) -> Iterator[tuple[str, str]]:
    yield "time", format_seconds(timeline.seconds)
    yield "computing", format_seconds(timeline.compute_seconds)
    if timeline.replay_seconds:
        yield "recomputing", format_seconds(timeline.replay_seconds)
    yield "waiting for copies", format_seconds(timeline.stall_seconds)
    for peak in timeline.peaks:
        yield f"peak of {peak.tier.value}", format_bytes(peak.nbytes)
    if trace.ops:
        yield "peak at", trace.locate(timeline.peak_op)
    for moved in timeline.moved:
        yield f"moved by {moved.lane.value}", f"{format_bytes(moved.nbytes)}, {moved.copies} copies"
    seconds: Counter[str] = Counter()
    for stall in timeline.stalls:
        seconds[stall.cause.value] += stall.seconds  # type: ignore[assignment]
    for cause, waited in seconds.most_common():
        yield f"stalled by {cause}", format_seconds(waited)
