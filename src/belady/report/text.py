"""A Run as plain text for a terminal: the answer first, then what moved and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Encode, Offload, Plan
from belady.ir.residency import intervals
from belady.ir.run import Run
from belady.ir.timeline import Measured, Timeline
from belady.ir.trace import Phase, StorageKind, Tier, Trace
from belady.units import format_bytes, format_seconds, printable

_ROWS = 12
_LEVELS = ("time and peaks", "time, peaks, bytes and stalls", "every event")
_ABSENT = "-"


def describe(run: Run) -> str:
    """Say whether it fits, what it cost, what moved and why, and what could not be managed.

    Names from the user's model are escaped: nothing in the text can steer a terminal.

    Parameters
    ----------
    run
        Its ``measured`` may be None: then predictions stand alone.

    Returns
    -------
    str
        Lines, each ended by a newline.
    """
    parts = (
        _answer(run),
        _figures(run),
        _peak(run),
        _moved(run),
        _largest(run),
        _defaults(run.measured),
        _outside(run),
        _remarks(run),
    )
    sections = ["\n".join(printable(line) for line in part) for part in map(list, parts) if part]
    return "\n\n".join(sections) + "\n"


def _answer(run: Run) -> Iterator[str]:
    plan, measured = run.plan, run.measured
    budget = f"a budget of {format_bytes(plan.budget.device_bytes)}"
    if measured is None:
        needed = run.hardware.allocator.budget_for(plan.predicted_peak_bytes)
        verb = "should fit" if needed <= plan.budget.device_bytes else "SHOULD NOT FIT"
        peak = f"a predicted peak of {format_bytes(plan.predicted_peak_bytes)}, not measured yet"
    else:
        held = max(measured.peak(Tier.DEVICE), measured.reserved_bytes)
        verb = "fits" if held <= plan.budget.device_bytes else "DOES NOT FIT"
        peak = f"a measured peak of {format_bytes(measured.peak(Tier.DEVICE))}"
        if measured.reserved_bytes:
            peak += f" ({format_bytes(measured.reserved_bytes)} reserved)"
    yield f"It {verb}: {peak}, {budget}."
    roots = ", ".join(run.trace.roots)
    yield f"{roots} on {run.hardware.name} ({run.trace.device}), planned by {plan.planner}"


def _figures(run: Run) -> Iterator[str]:
    rows = [("", "predicted", "measured"), *_figure_rows(run)]
    yield from _table(rows)
    measured = run.measured
    if measured is None:
        return
    level = _LEVELS[measured.level] if 0 <= measured.level < len(_LEVELS) else "unknown"
    times = ", ".join(format_seconds(seconds) for seconds in measured.iterations)
    yield f"Measured at level {measured.level} ({level}), iterations of {times}."
    if run.trace.device == "cpu":
        yield "The device peak of a CPU was counted op by op in the iteration before those."


def _figure_rows(run: Run) -> Iterator[tuple[str, str, str]]:
    predicted, measured = run.predicted, run.measured

    def seen(text: str) -> str:
        return text if measured is not None else _ABSENT

    for tier in Tier:
        peaks = predicted.peak(tier), measured.peak(tier) if measured else 0
        if tier is Tier.DEVICE or any(peaks):
            yield f"peak of {tier.value}", format_bytes(peaks[0]), seen(format_bytes(peaks[1]))
    if measured and measured.reserved_bytes:
        yield "reserved by torch's allocator", _ABSENT, format_bytes(measured.reserved_bytes)
    now = measured.seconds if measured else 0.0
    yield "time of an iteration", format_seconds(predicted.seconds), seen(format_seconds(now))
    yield "  computing", format_seconds(predicted.compute_seconds), _ABSENT
    waited = measured.stall_seconds if measured and measured.level else None
    waiting = _ABSENT if waited is None else format_seconds(waited)
    yield "  waiting for copies (stall)", format_seconds(predicted.stall_seconds), waiting
    yield (
        "  overhead: stall over the rest",
        _overhead(predicted.seconds, predicted.stall_seconds),
        _ABSENT if waited is None else _overhead(now, waited),
    )
    yield from _lane_rows(predicted, measured)


def _overhead(seconds: float, stall_seconds: float) -> str:
    rest = seconds - stall_seconds
    return f"{stall_seconds / rest:.1%}" if rest > 0 else _ABSENT


def _lane_rows(predicted: Timeline, measured: Measured | None) -> Iterator[tuple[str, str, str]]:
    def text(nbytes: int, copies: int) -> str:
        return f"{format_bytes(nbytes)} in {copies}" if copies else _ABSENT

    planned = {moved.lane: text(moved.nbytes, moved.copies) for moved in predicted.moved}
    done = {m.lane: text(m.nbytes, m.copies) for m in (measured.moved if measured else ())}
    for lane in dict.fromkeys([*planned, *done]):
        yield f"{lane.value}, bytes in copies", planned.get(lane, _ABSENT), done.get(lane, _ABSENT)


def _peak(run: Run) -> Iterator[str]:
    """What is held at the predicted peak, by kind."""
    trace, at = run.trace, run.predicted.peak_op
    if not 0 <= at < len(trace.ops):
        return
    held: Counter[str] = Counter()
    for span in intervals(trace, run.plan):
        if span.tier is Tier.DEVICE and span.start <= at < span.end:
            name = trace.storages[span.storage].kind.value
            held[name] += run.hardware.allocator.held(span.nbytes)
    held["workspace"] += max(0, run.predicted.peak(Tier.DEVICE) - held.total())
    parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in held.most_common() if nbytes]
    yield f"Predicted peak: {trace.locate(at)}"
    yield f"  held then: {', '.join(parts)}"


def _moved(run: Run) -> Iterator[str]:
    trace, plan = run.trace, run.plan
    counts: Counter[str] = Counter()
    storages: dict[str, set[int]] = {}
    for value in trace.saved:
        name = _decision(plan, value)
        counts[name] += 1
        storages.setdefault(name, set()).add(trace.values[value].storage)
    if not plan.decisions:
        yield "Nothing moves."
    for name, count in counts.most_common():
        nbytes = sum(trace.storages[storage].nbytes for storage in storages[name])
        yield f"{name}: {count} saved values, {format_bytes(nbytes)}"


def _decision(plan: Plan, value: int) -> str:
    decision = plan.decisions.get(value)
    if decision is None:
        return "keep"
    if isinstance(decision, Offload):
        return f"offload to {decision.tier.value}"
    if isinstance(decision, Encode):
        return f"encode ({decision.codec})"
    return type(decision).__name__.lower()


def _largest(run: Run) -> Iterator[str]:
    trace, plan = run.trace, run.plan

    def size(value: int) -> int:
        return trace.storages[trace.values[value].storage].nbytes

    largest = sorted(trace.saved, key=lambda value: (-size(value), value))
    if not largest:
        return
    reasons = {assignment.value: assignment.reason for assignment in plan.assignments}
    rows = [("module", "saved by", "shape", "dtype", "bytes", "decision", "reason")]
    for value in largest[:_ROWS]:
        save = trace.values[value].saves[0]
        rows.append(
            (
                save.module or _ABSENT,
                _short(trace.ops[save.op].name),
                "x".join(map(str, save.shape)) or "scalar",
                save.dtype,
                format_bytes(size(value)),
                _decision(plan, value),
                reasons.get(value, "") or _ABSENT,
            )
        )
    left = len(largest) - len(rows) + 1
    yield f"The largest saved values{f' ({left} more are smaller or equal)' if left else ''}:"
    yield from _table(rows)


def _short(name: str) -> str:
    """``aten.convolution.default`` is ``convolution``."""
    parts = name.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else name


def _defaults(measured: Measured | None) -> Iterator[str]:
    if measured is None:
        return
    if not measured.defaults:
        yield "Every save matched the plan."
        return
    total = sum(count for _, count in measured.defaults)
    yield f"{total} saves that did not match the plan were kept, with their version checked:"
    for reason, count in measured.defaults:
        yield f"  {reason}: {count}"


def _outside(run: Run) -> Iterator[str]:
    lines = [f"  {name}: {format_bytes(nbytes)}" for name, nbytes in _unmanaged(run) if nbytes > 0]
    if lines:
        yield "Outside management (in the budget unless said otherwise, never moved):"
        yield from lines


def _unmanaged(run: Run) -> Iterator[tuple[str, int]]:
    trace = run.trace
    yield "made by the loss outside the roots, held into backward", _loss_bytes(trace)
    for kind, text in (
        (StorageKind.INPUT, "inputs of the roots, which the caller holds"),
        (StorageKind.OTHER, "held throughout, not seen in any op"),
    ):
        yield text, sum(s.nbytes for s in trace.storages if s.kind is kind)
    yield "in use outside torch (not in the budget)", run.hardware.outside_bytes


def _loss_bytes(trace: Trace) -> int:
    backward = next((i for i, op in enumerate(trace.ops) if op.phase is Phase.BACKWARD), -1)
    managed = {trace.values[value].storage for value in trace.saved}
    return sum(
        storage.nbytes
        for index, storage in enumerate(trace.storages)
        if index not in managed
        and storage.kind is StorageKind.ACTIVATION
        and storage.birth < backward < storage.death
        and trace.ops[storage.birth].phase is Phase.LOSS
    )


def _remarks(run: Run) -> Iterator[str]:
    plan = run.plan
    if plan.numerics:
        yield f"Can change a bit of the result: {', '.join(plan.numerics)}"
    if plan.layer_algorithms:
        yield (
            f"Convolution algorithms are chosen layer by layer in the prediction alone; when it "
            f"runs, one setting holds for the whole phase: {plan.workspace.value}"
        )
    yield from (f"Note: {note}" for note in run.notes)
    yield from _versions(run.hardware, run.versions)


def _versions(hardware: HardwareProfile, versions: Sequence[tuple[str, str]]) -> Iterator[str]:
    known = {**dict(hardware.versions), **dict(versions)}
    if known:
        yield "Versions: " + ", ".join(f"{name} {version}" for name, version in known.items())


def _table(rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Columns flush left, two spaces apart."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield f"  {'  '.join(padded)}".rstrip()
