"""How far a prediction was from what was measured in the end, in all and phase by phase."""

from __future__ import annotations

from collections.abc import Iterator

from belady.ir.curves import curve
from belady.ir.margin import needed
from belady.ir.run import Run
from belady.ir.timeline import Lane
from belady.ir.trace import Phase, Source, Tier
from belady.units import format_bytes, format_seconds

ABSENT = "-"
_NAMES = {
    Phase.FORWARD: "forward",
    Phase.BACKWARD: "loss and backward",
    Phase.OPTIMIZER: "optimizer's step",
}


def predicted_phases(run: Run) -> dict[Phase, float]:
    """Seconds that compute is predicted to spend in each phase; empty where no op shows when.

    A phase lasts from the end of the op before it to the end of its own last op, waits and replays
    in between included, as events on the stream of compute see it.
    """
    ends: dict[int, float] = {}
    for span in run.predicted.spans:
        if span.lane is Lane.COMPUTE and 0 <= span.op < len(run.trace.ops):
            ends[span.op] = max(span.end_s, ends.get(span.op, 0.0))
    took: dict[Phase, float] = {}
    at = 0.0
    for op in sorted(ends):
        phase = run.trace.ops[op].phase
        phase = Phase.BACKWARD if phase is Phase.LOSS else phase
        end = max(at, ends[op])
        took[phase] = took.get(phase, 0.0) + end - at
        at = end
    if took:
        # A copy that compute still waits for when all ops have run.
        took[phase] += max(0.0, run.predicted.seconds - at)
    return took


def phases(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, predicted, and measured with its error, of each phase that is known."""
    predicted = predicted_phases(run)
    measured = {it.phase: it.seconds for it in run.measured.phases} if run.measured else {}
    for phase, name in _NAMES.items():
        if phase is Phase.BACKWARD and run.trace.source is Source.GRAPH:
            name = "backward"
        if phase in predicted or phase in measured:
            yield f"  {name}", *_side_by_side(predicted.get(phase), measured.get(phase))


def _side_by_side(predicted: float | None, measured: float | None) -> tuple[str, str]:
    there = ABSENT if predicted is None else format_seconds(predicted)
    if measured is None:
        return there, ABSENT
    error = f" ({_error(measured, predicted)})" if predicted else ""
    return there, format_seconds(measured) + error


def most_reserved(run: Run) -> int:
    """What torch's allocator may reserve for the predicted peak, the margin being enough."""
    allocator = run.hardware.allocator
    held = run.predicted.curve or curve(run.trace, run.plan, allocator)
    return needed(run.trace, allocator, held)[0]


def final(run: Run) -> Iterator[str]:
    """One line: measured against predicted after all corrections; none if nothing was measured."""
    measured, predicted = run.measured, run.predicted
    if measured is None or not predicted.seconds:
        return
    found = [f"time {_error(measured.seconds, predicted.seconds)}"]
    peak, seen = predicted.peak(Tier.DEVICE), measured.peak(Tier.DEVICE)
    if peak and seen:
        found.append(f"peak {_error(seen, peak)}")
    if measured.reserved_bytes:
        most = most_reserved(run)
        found.append(
            f"reserved {measured.reserved_bytes / most:.1%} of the {format_bytes(most)} that peak "
            "and margin allow"
        )
    yield f"Final error, measured against predicted: {', '.join(found)}."


def _error(measured: float, predicted: float) -> str:
    """By how much what was measured is more than what was predicted."""
    error = measured / predicted - 1
    return "as predicted" if abs(error) < 5e-4 else f"{error:+.1%}"
