"""The top of a page: what it costs, in a sentence and in four figures."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from belady.ir.plan import Managed, Offload
from belady.ir.run import Run
from belady.ir.timeline import Cause, Measured, Timeline
from belady.ir.trace import Tier
from belady.report import facts
from belady.units import format_bytes, format_seconds

_CAUSES = {
    Cause.COPY_OUT: "for a copy-out, to have room",
    Cause.COPY_IN: "for a copy-in, to have the bytes",
    Cause.HOST: "for the host (no stall)",
}


class Tile(NamedTuple):
    """One figure, what it is of, and what to compare it with; a share fills a bar."""

    name: str
    figure: str
    beside: str
    share: float | None = None


def cost(run: Run) -> str:
    """One sentence: how long computation waits."""
    stalled, measured = facts.waited(run), run.measured
    if stalled is None or measured is None:
        total, stalled, did = run.predicted.seconds, run.predicted.stall_seconds, "should wait"
    else:
        total, did = measured.seconds, "waited"
    replays = run.predicted.replay_seconds
    if stalled <= 0 and not replays:
        return f"Computation {did} for no copy."
    waited = f"{did} {format_seconds(stalled)} of {format_seconds(total)} for copies"
    if replays:
        waited += f" and runs ops again for {format_seconds(replays)}, as predicted"
    return f"Computation {waited}: an overhead of {facts.overhead(run, total, stalled)}."


def tiles(run: Run) -> list[Tile]:
    """Peak, time, overhead and what moves: measured where measured, else predicted."""
    return [_peak(run), _time(run), _overhead(run), _moved(run)]


def causes(run: Run) -> list[tuple[str, str, str]]:
    """What computation waits for: predicted, and measured where every event was."""
    predicted = _by_cause(run.predicted)
    measured = _by_cause(run.measured) if run.measured and run.measured.level > 1 else None

    def rows() -> Iterator[tuple[str, str, str]]:
        for cause, name in _CAUSES.items():
            # Waits for copies are recorded, the host's lateness is not.
            unseen = None if cause is Cause.HOST else 0.0
            seen = None if measured is None else measured.get(cause, unseen)
            if predicted.get(cause) or seen:
                text = facts.ABSENT if seen is None else format_seconds(seen)
                yield name, format_seconds(predicted.get(cause, 0.0)), text

    return list(rows())


def _by_cause(side: Timeline | Measured) -> dict[Cause, float]:
    seconds: dict[Cause, float] = {}
    for stall in side.stalls:
        seconds[stall.cause] = seconds.get(stall.cause, 0.0) + stall.seconds
    return seconds


def _peak(run: Run) -> Tile:
    budget, predicted = run.plan.budget.device_bytes, run.predicted.peak(Tier.DEVICE)
    peak = run.measured.peak(Tier.DEVICE) if run.measured else predicted
    beside = f"of {format_bytes(budget)}"
    if run.measured:
        beside += f"; predicted {format_bytes(predicted)}"
    share = min(peak / budget, 1.0) if budget else None
    name = "measured peak" if run.measured else "predicted peak"
    return Tile(name, format_bytes(peak), beside, share)


def _time(run: Run) -> Tile:
    predicted = format_seconds(run.predicted.seconds)
    if run.measured is None:
        return Tile("predicted iteration", predicted, "not measured")
    seconds = run.measured.seconds
    return Tile("measured iteration", format_seconds(seconds), f"predicted {predicted}")


def _overhead(run: Run) -> Tile:
    expected = facts.overhead(run, run.predicted.seconds, run.predicted.stall_seconds)
    stalled, measured = facts.waited(run), run.measured
    if stalled is None or measured is None:
        beside = f"waiting {format_seconds(run.predicted.stall_seconds)}"
        return Tile("predicted overhead", expected, beside)
    beside = f"waited {format_seconds(stalled)}; predicted {expected}"
    return Tile("measured overhead", facts.overhead(run, measured.seconds, stalled), beside)


def _moved(run: Run) -> Tile:
    trace, decisions = run.trace, run.plan.decisions
    moved = [value for value in trace.saved if isinstance(decisions.get(value), (Offload, Managed))]
    nbytes = sum(trace.storages[trace.values[value].storage].nbytes for value in moved)
    beside = f"{len(moved)} of {len(trace.saved)} saved values"
    return Tile("moved away and back", format_bytes(nbytes), beside)
