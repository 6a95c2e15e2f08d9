"""What every report says of a Run, whatever it looks like: answers, figures, decisions, bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from belady.ir.curves import curve, managed_room
from belady.ir.margin import needed
from belady.ir.plan import Encode, Managed, Offload, Plan
from belady.ir.residency import intervals
from belady.ir.run import Run
from belady.ir.timeline import Measured, Timeline
from belady.ir.trace import Phase, Source, StorageKind, Tier, Trace
from belady.report import errors
from belady.units import format_bytes, format_seconds

ABSENT = errors.ABSENT
_LEVELS = ("time and peaks", "time, peaks, bytes and stalls", "every event")


class Group(NamedTuple):
    """The saved values that share a decision, and the bytes of their storages."""

    decision: str
    values: int
    nbytes: int


class Saved(NamedTuple):
    """One saved value: what it is, what was decided and why."""

    value: int
    module: str
    saved_by: str
    shape: str
    dtype: str
    nbytes: int
    decision: str
    reason: str


def fits(run: Run) -> bool:
    """Whether the budget holds: as measured, or as predicted where nothing was measured."""
    budget, measured = run.plan.budget.device_bytes, run.measured
    if measured is None:
        allocator = run.hardware.allocator
        held = run.predicted.curve or curve(run.trace, run.plan, allocator)
        return needed(run.trace, allocator, held)[0] <= budget
    return max(measured.peak(Tier.DEVICE), measured.reserved_bytes) <= budget


def answer(run: Run) -> str:
    """One sentence: does it fit."""
    plan, measured = run.plan, run.measured
    if measured is None:
        verb = "should fit" if fits(run) else "SHOULD NOT FIT"
        peak = f"a predicted peak of {format_bytes(plan.predicted_peak_bytes)}, not measured yet"
    else:
        verb = "fits" if fits(run) else "DOES NOT FIT"
        peak = f"a measured peak of {format_bytes(measured.peak(Tier.DEVICE))}"
        if measured.reserved_bytes:
            peak += f" ({format_bytes(measured.reserved_bytes)} reserved)"
    what = "It" if run.counts_all else "What was captured (the rest is not counted)"
    return f"{what} {verb}: {peak}, a budget of {format_bytes(plan.budget.device_bytes)}."


def subject(run: Run) -> str:
    """What ran where, by which policy."""
    roots = ", ".join(run.trace.roots)
    return f"{roots} on {run.hardware.name} ({run.trace.device}), planned by {run.plan.planner}"


def waited(run: Run) -> float | None:
    """Seconds that compute was measured to wait for copies; None where that was not measured."""
    measured = run.measured
    seen = measured is not None and measured.level > 0 and not measured.launched
    return measured.stall_seconds if measured is not None and seen else None


def overhead(run: Run, seconds: float, stall_seconds: float) -> str:
    """Stall and replays over the rest of the iteration; replays take the time that is predicted."""
    lost = stall_seconds + run.predicted.replay_seconds
    rest = seconds - lost
    return f"{lost / rest:.1%}" if rest > 0 else ABSENT


def measurement(run: Run) -> list[str]:
    """How it was measured; nothing where it was not."""
    measured = run.measured
    if measured is None:
        return []
    level = _LEVELS[measured.level] if 0 <= measured.level < len(_LEVELS) else "unknown"
    times = ", ".join(format_seconds(seconds) for seconds in measured.iterations)
    which = " and ".join(map(str, measured.numbers))
    lines = [
        *errors.final(run),
        f"Measured at level {measured.level} ({level}), verified in iterations "
        + (f"{which}, of {times}." if which else f"of {times}."),
    ]
    if recording(run):
        lines.append(_recorded(run, measured))
    if run.trace.device == "cpu":
        # Beside graphs, ops are seen by nobody: capturing and watching every op exclude each other.
        of = ", of captured graphs alone" if run.trace.source is Source.GRAPH else ""
        lines.append(
            f"The device peak of a CPU was counted op by op in the iteration before those{of}."
        )
    return lines


def _recorded(run: Run, measured: Measured) -> str:
    waited_s = sum(stall.seconds for stall in measured.stalls)
    said = (
        f"{recording(run)} was recorded event by event: {format_seconds(waited_s)} of "
        f"{format_seconds(measured.recorded_seconds)} waiting for copies. Lanes and causes of "
        "waits are of that one; "
    )
    if measured.launched:
        return said + "it was issued op by op, as nobody sees what a launch waits for."
    return said + "time and stall are medians of the verified ones."


def recording(run: Run) -> str:
    """Which iteration was recorded; empty where none was."""
    return f"Iteration {run.measured.recorded}" if run.measured and run.measured.recorded else ""


def figures(run: Run) -> Iterator[tuple[str, str, str]]:
    """Name, predicted and measured; the name of a part is indented."""
    predicted, measured = run.predicted, run.measured

    def seen(text: str) -> str:
        return text if measured is not None else ABSENT

    for tier in Tier:
        peaks = predicted.peak(tier), measured.peak(tier) if measured else 0
        if tier is Tier.DEVICE or any(peaks):
            yield f"peak of {tier.value}", format_bytes(peaks[0]), seen(format_bytes(peaks[1]))
    if measured and measured.reserved_bytes:
        most = f"at most {format_bytes(errors.most_reserved(run))}"
        yield "reserved by torch's allocator", most, format_bytes(measured.reserved_bytes)
    now = measured.seconds if measured else 0.0
    yield "time of an iteration", format_seconds(predicted.seconds), seen(format_seconds(now))
    yield "  computing", format_seconds(predicted.compute_seconds), ABSENT
    stalled = waited(run)
    waiting = ABSENT if stalled is None else format_seconds(stalled)
    yield "  waiting for copies (stall)", format_seconds(predicted.stall_seconds), waiting
    lost = "stall"
    if predicted.replay_seconds:
        lost = "stall and replays"
        yield "  running ops again (replays)", format_seconds(predicted.replay_seconds), ABSENT
    yield (
        f"  overhead: {lost} over the rest",
        overhead(run, predicted.seconds, predicted.stall_seconds),
        ABSENT if stalled is None else overhead(run, now, stalled),
    )
    yield from errors.phases(run)
    yield from _lanes(predicted, measured)


def _lanes(predicted: Timeline, measured: Measured | None) -> Iterator[tuple[str, str, str]]:
    def text(nbytes: int, copies: int) -> str:
        return f"{format_bytes(nbytes)} in {copies}" if copies else ABSENT

    planned = {moved.lane: text(moved.nbytes, moved.copies) for moved in predicted.moved}
    done = {m.lane: text(m.nbytes, m.copies) for m in (measured.moved if measured else ())}
    for lane in dict.fromkeys([*planned, *done]):
        yield f"{lane.value}, bytes in copies", planned.get(lane, ABSENT), done.get(lane, ABSENT)


def peak_place(run: Run) -> str:
    """The op at the predicted peak; empty where the trace does not have it."""
    at = run.predicted.peak_op
    return run.trace.locate(at) if 0 <= at < len(run.trace.ops) else ""


def held_at_peak(run: Run) -> list[tuple[str, int]]:
    """Bytes held at the predicted peak by kind, most first."""
    trace, at = run.trace, run.predicted.peak_op
    held = Counter[str]()
    for span in intervals(trace, run.plan):
        if span.tier is Tier.DEVICE and span.start <= at < span.end:
            name = trace.storages[span.storage].kind.value
            held[name] += run.hardware.allocator.held(span.nbytes)
    held["managed blocks"] += managed_room(trace, run.plan, run.hardware.allocator)
    held["workspace"] += max(0, run.predicted.peak(Tier.DEVICE) - held.total())
    return [(name, nbytes) for name, nbytes in held.most_common() if nbytes]


def groups(run: Run) -> list[Group]:
    """The saved values by decision, most values first."""
    trace, plan = run.trace, run.plan
    counts, storages = Counter[str](), dict[str, set[int]]()
    for value in trace.saved:
        name = decision_name(plan, value)
        counts[name] += 1
        storages.setdefault(name, set()).add(trace.values[value].storage)
    return [
        Group(name, count, sum(trace.storages[index].nbytes for index in storages[name]))
        for name, count in counts.most_common()
    ]


def decision_name(plan: Plan, value: int) -> str:
    """What a plan does with a value, in a few words."""
    decision = plan.decisions.get(value)
    if decision is None:
        return "keep"
    if isinstance(decision, Offload):
        return f"offload to {decision.tier.value}"
    if isinstance(decision, Managed):
        return "managed memory, " + ("read by page faults" if decision.faults else "prefetched")
    if isinstance(decision, Encode):
        return f"encode ({decision.codec})"
    return type(decision).__name__.lower()


def largest(run: Run, count: int) -> list[Saved]:
    """The ``count`` largest saved values, largest first."""
    trace, plan = run.trace, run.plan

    def size(value: int) -> int:
        return trace.storages[trace.values[value].storage].nbytes

    reasons = {assignment.value: assignment.reason for assignment in plan.assignments}
    chosen = sorted(trace.saved, key=lambda value: (-size(value), value))[:count]
    return [
        Saved(
            value,
            save.module or ABSENT,
            short_name(trace.ops[save.op].name),
            "x".join(map(str, save.shape)) or "scalar",
            save.dtype,
            size(value),
            decision_name(plan, value),
            reasons.get(value, "") or ABSENT,
        )
        for value in chosen
        for save in trace.values[value].saves[:1]
    ]


def short_name(name: str) -> str:
    """``aten.convolution.default`` is ``convolution``."""
    parts = name.split(".")
    return parts[1] if parts[0] == "aten" and len(parts) > 1 else name


def defaults(run: Run) -> tuple[str, list[str]] | None:
    """Saves that did not match the plan: a sentence, and a line for each reason."""
    if run.measured is None:
        return None
    found = run.measured.defaults
    if not found:
        return "Every save matched the plan.", []
    total = sum(count for _, count in found)
    return (
        f"{total} saves that did not match the plan were kept, with their version checked:",
        [f"{reason}: {count}" for reason, count in found],
    )


def outside(run: Run) -> list[tuple[str, int]]:
    """Bytes that nobody plans for, by what they are."""
    trace = run.trace
    found = [("made by the loss outside the roots, held into backward", _loss_bytes(trace))]
    for kind, text in (
        (StorageKind.INPUT, "inputs of the roots, which the caller holds"),
        (StorageKind.OTHER, "held throughout, not seen in any op"),
    ):
        found.append((text, sum(s.nbytes for s in trace.storages if s.kind is kind)))
    found.append(("in use outside torch (not in the budget)", run.hardware.outside_bytes))
    return [(name, nbytes) for name, nbytes in found if nbytes > 0]


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


def versions(run: Run) -> str:
    """Names and versions of the software that took part."""
    known = {**dict(run.hardware.versions), **dict(run.versions)}
    return ", ".join(f"{name} {version}" for name, version in known.items())
