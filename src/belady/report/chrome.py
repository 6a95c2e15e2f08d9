"""A Run as Chrome trace JSON, the format that Perfetto opens and torch.profiler writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from belady.ir.curves import tier_curve
from belady.ir.residency import intervals
from belady.ir.run import Run
from belady.ir.timeline import Lane, Measured, Span, Stall, Timeline
from belady.ir.trace import Tier
from belady.report.facts import decision_name
from belady.report.merge import ALONE, Place, Profile, merged, place_in
from belady.report.tracks import CATEGORY, Event, Piece, Process, microseconds
from belady.units import printable

_LANES = (Lane.COPY_OUT, Lane.COPY_IN, Lane.DISK_WRITE, Lane.DISK_READ)


def chrome_trace(run: Run, profile: Profile | None = None, step: int | None = None) -> bytes:
    """Draw the prediction and, where it was recorded, the measurement of a run.

    Each is a process with a track for each lane and one for stalls, and counters of the bytes
    held. Predicted bytes change when compute starts an op, measured ones when the host came to a
    boundary. The same arguments give the same bytes.

    Parameters
    ----------
    profile
        A trace of torch.profiler, as `belady.report.merge.read_profile` gives it, to draw beside.
    step
        The iteration begins where ``ProfilerStep#step`` does; without it at the first step that
        ``profile`` has, or at its first event.

    Raises
    ------
    DocumentError
        If ``profile`` has no such step.
    """
    place = ALONE if profile is None else place_in(profile, step)
    sides: list[tuple[str, Timeline | Measured]] = [("predicted", run.predicted)]
    seen = run.measured
    if seen is not None and (seen.spans or seen.stalls or seen.held):
        sides.append(("measured", seen))
    if profile is None:
        # Perfetto drops what lies before 0.
        starts = [span.start_s for _, side in sides for span in side.spans]
        starts += [stall.start_s for _, side in sides for stall in side.stalls]
        place = Place(origin_us=max(0.0, -microseconds(min(starts, default=0.0))))
    ids = place.ids()
    says = _Says(run)
    events: list[Event] = []
    for order, (name, side) in enumerate(sides):
        process = Process(f"{CATEGORY}: {name}", order, place.origin_us, ids)
        _draw(process, says, side)
        events += process.events()
    document = merged(profile, events, _about(run))
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode("ascii")


def _about(run: Run) -> Event:
    """What the file says of itself, beside its events."""
    return {
        "trace": run.trace.fingerprint,
        "planner": printable(run.plan.planner),
        "hardware": printable(run.hardware.name),
        "budget_bytes": run.plan.budget.device_bytes,
    }


def _draw(process: Process, says: _Says, side: Timeline | Measured) -> None:
    run = says.run
    lanes: dict[Lane, list[Piece]] = {lane: [] for lane in Lane}
    for span in side.spans:
        lanes[span.lane].append(says.span(span, alone=isinstance(side, Timeline)))
    process.track(Lane.HOST.value, "issue", lanes[Lane.HOST])
    process.track(Lane.COMPUTE.value, "work", lanes[Lane.COMPUTE])
    process.track("stall", "stall", map(says.stall, side.stalls))
    for lane in _LANES:
        process.track(lane.value, "copy", lanes[lane])
    process.counter("budget of device", [(0.0, run.plan.budget.device_bytes)])
    if isinstance(side, Measured):
        process.counter("held on device", ((held.seconds, held.nbytes) for held in side.held))
    else:
        for tier, points in _predicted_bytes(run):
            process.counter(f"held on {tier.value}", points)


def _predicted_bytes(run: Run) -> Iterator[tuple[Tier, Iterable[tuple[float, int]]]]:
    """Bytes held in each tier during each op, from the moment when compute starts it."""
    ops = len(run.trace.ops)
    starts = {
        s.op: s.start_s for s in run.predicted.spans if s.lane is Lane.COMPUTE and s.value < 0
    }
    spans = intervals(run.trace, run.plan)
    for tier in Tier:
        curve = run.predicted.curve if tier is Tier.DEVICE else tier_curve(spans, tier, ops)
        if any(curve):
            yield tier, [(starts[op], curve[op]) for op in sorted(starts) if op >= 0]


class _Says:
    """Names and args of what is drawn, worked out once for each op and value."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._reasons = {a.value: printable(a.reason) for a in run.plan.assignments}
        self._ops: dict[int, tuple[str, Event]] = {}
        self._values: dict[int, tuple[str, Event]] = {}

    def span(self, span: Span, *, alone: bool) -> Piece:
        """Work on a lane; not ``alone``, its op is the first of those up to the next anchor."""
        if span.value >= 0:
            name, args = self._value(span.value)
            flow = -1 if span.lane in (Lane.HOST, Lane.COMPUTE) else span.value
            return Piece(span.start_s, span.end_s, name, args, flow)
        name, args = self._op(span.op) if span.op >= 0 else (span.lane.value, {})
        if not alone:
            name, args = f"from {name}", {"from_op": span.op}
        elif span.lane is Lane.HOST:
            # All that is known of an op stands where it runs.
            args = {"op": span.op}
        return Piece(span.start_s, span.end_s, name, args)

    def stall(self, stall: Stall) -> Piece:
        """Time that compute waited."""
        args: Event = {"cause": stall.cause.value}
        if stall.op >= 0:
            args["before"] = self._op(stall.op)[0]
        if stall.value >= 0:
            args |= self._value(stall.value)[1]
        return Piece(stall.start_s, stall.end_s, f"wait for {stall.cause.value}", args)

    def _op(self, index: int) -> tuple[str, Event]:
        if index == len(self.run.trace.ops):
            return "the end of the iteration", {"op": index}
        if index not in self._ops:
            op = self.run.trace.ops[index]
            name, module = printable(op.name), printable(op.module)
            args: Event = {"op": index, "module": module, "phase": op.phase.value}
            if self.run.predicted.curve:
                args["held_bytes"] = self.run.predicted.curve[index]
            args["workspace_bytes"] = op.workspace_bytes
            self._ops[index] = (f"{name} ({module})" if module else name), args
        return self._ops[index]

    def _value(self, index: int) -> tuple[str, Event]:
        if index not in self._values:
            trace = self.run.trace
            value = trace.values[index]
            name = f"value {index}"
            args: Event = {"value": index, "bytes": trace.storages[value.storage].nbytes}
            if value.saves:
                save = value.saves[0]
                saver, module = printable(trace.ops[save.op].name), printable(save.module)
                args |= {"op": save.op, "saved_by": saver, "module": module}
                args["phase"] = trace.ops[save.op].phase.value
                name += f" ({module or saver})"
            args["decision"] = printable(decision_name(self.run.plan, index))
            args["reason"] = self._reasons.get(index, "")
            self._values[index] = name, args
        return self._values[index]
