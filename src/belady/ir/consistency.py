"""Do the numbers in a document refer to what is there, and could they be measured?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from operator import attrgetter, eq
from typing import NoReturn

from belady.errors import DocumentError, PlanMismatchError
from belady.ir.hardware import HardwareProfile, Link
from belady.ir.plan import Decision, Encode, Keep, Managed, Offload, Plan, Recompute
from belady.ir.run import Run
from belady.ir.timeline import Measured, Span, Stall, Timeline
from belady.ir.trace import Op, Save, Storage, Trace, Value

# Thirty years: nobody who draws an iteration needs to think of anything longer.
_LONGEST_S = 1e9
_BOUNDARIES: dict[type[Decision], tuple[str, ...]] = {
    Keep: (),
    Offload: ("free_at", "copy_in_at", "ready_by"),
    Recompute: ("at",),
    Encode: ("encode_at", "decode_at"),
    Managed: ("prefetch_out_at", "gone_by", "prefetch_in_at", "ready_by"),
}


def validate(document: object) -> None:
    """Check a Trace, a HardwareProfile or a Run; by themselves, other documents refer to nothing.

    Raises
    ------
    DocumentError
        If an id or boundary is out of range or out of order, or a size, duration or rate is
        negative or not finite; the message starts with the path inside the document.
    PlanMismatchError
        If the plan of a Run is for another trace.
    """
    if isinstance(document, Trace):
        _trace(document, "")
    elif isinstance(document, HardwareProfile):
        _hardware(document, "")
    elif isinstance(document, Run):
        _trace(document.trace, "trace.")
        _hardware(document.hardware, "hardware.")
        _run(document)


def _fail(path: str, message: str) -> NoReturn:
    raise DocumentError(f"{path}: {message}")


def _within(path: str, number: int, low: int, high: int) -> None:
    if not low <= number <= high:
        _fail(path, f"{number} is not between {low} and {high}")


def _all_within(path: str, numbers: Iterable[int], low: int, high: int) -> None:
    for index, number in enumerate(numbers):
        if not low <= number <= high:
            _fail(f"{path}[{index}]", f"{number} is not between {low} and {high}")


def _amount(path: str, number: float) -> None:
    # Also false for NaN.
    if not 0 <= number < math.inf:
        _fail(path, f"{number} is negative or not finite")


# Of many items one field at a time: to name and to call for each of them takes longer than to look.


def _each_within(path: str, items: Sequence[object], name: str, low: int, high: int) -> None:
    numbers = list(map(attrgetter(name), items))
    if numbers and not low <= min(numbers) <= max(numbers) <= high:
        for index, number in enumerate(numbers):
            _within(f"{path}[{index}].{name}", number, low, high)


def _lists_within(path: str, items: Sequence[object], name: str, high: int) -> None:
    lists = list(map(attrgetter(name), items))
    numbers = list(chain.from_iterable(lists))
    if numbers and not 0 <= min(numbers) <= max(numbers) <= high:
        for index, found in enumerate(lists):
            _all_within(f"{path}[{index}].{name}", found, 0, high)


def _amounts(path: str, items: Sequence[object], *names: str) -> None:
    for name in names:
        numbers = list(map(attrgetter(name), items))
        # What is not equal to itself is NaN, among which there is no least.
        known = all(map(eq, numbers, numbers))
        if numbers and not (known and min(numbers) >= 0 and max(numbers) < math.inf):
            for index, number in enumerate(numbers):
                _amount(f"{path}[{index}].{name}", number)


def _trace(trace: Trace, prefix: str) -> None:
    end = len(trace.ops)
    _ops(f"{prefix}ops", trace.ops, len(trace.values), end)
    _storages(f"{prefix}storages", trace.storages, end)
    _values(f"{prefix}values", trace.values, len(trace.storages), end)
    _all_within(f"{prefix}anchors", trace.anchors, 0, end)
    for index, (before, after) in enumerate(pairwise(trace.anchors), start=1):
        if before >= after:
            _fail(f"{prefix}anchors[{index}]", f"{after} does not follow {before}: not ascending")


def _ops(path: str, ops: Sequence[Op], values: int, end: int) -> None:
    _lists_within(path, ops, "reads", values - 1)
    _lists_within(path, ops, "writes", values - 1)
    _amounts(path, ops, "device_seconds", "host_seconds", "workspace_bytes", "pass_index")
    for index, op in enumerate(ops):
        if op.forward_op is not None:
            _within(f"{path}[{index}].forward_op", op.forward_op, 0, end - 1)
        if op.algorithms:
            inner = f"{path}[{index}].algorithms"
            _amounts(inner, op.algorithms, "device_seconds", "workspace_bytes")
        if op.shortcut is not None:
            inner = f"{path}[{index}].shortcut"
            _all_within(f"{inner}.reads", op.shortcut.reads, 0, values - 1)
            _all_within(f"{inner}.writes", op.shortcut.writes, 0, values - 1)
            _amount(f"{inner}.device_seconds", op.shortcut.device_seconds)
            for value in op.shortcut.writes:
                if value not in op.writes:
                    _fail(f"{inner}.writes", f"{value} is not among what the op writes")


def _storages(path: str, storages: Sequence[Storage], end: int) -> None:
    _amounts(path, storages, "nbytes")
    _each_within(path, storages, "birth", 0, end)
    _each_within(path, storages, "death", 0, end)
    for index, storage in enumerate(storages):
        if not storage.birth <= storage.released <= storage.death:
            _lifetime(f"{path}[{index}]", storage)


def _lifetime(path: str, storage: Storage) -> None:
    for low_name, name in pairwise(("birth", "released", "death")):
        low, number = getattr(storage, low_name), getattr(storage, name)
        if low > number:
            _fail(f"{path}.{name}", f"{number} lies before {low_name}, which is {low}")


def _values(path: str, values: Sequence[Value], storages: int, end: int) -> None:
    _each_within(path, values, "storage", 0, storages - 1)
    _amounts(path, values, "version")
    _each_within(path, values, "producer", -1, end - 1)
    for index, value in enumerate(values):
        for number, use in enumerate(value.uses):
            if not 0 <= use.op < end:
                _within(f"{path}[{index}].uses[{number}].op", use.op, 0, end - 1)
        for number, save in enumerate(value.saves):
            _save(f"{path}[{index}].saves[{number}]", save, end)


def _save(path: str, save: Save, end: int) -> None:
    _within(f"{path}.op", save.op, 0, end - 1)
    _amount(f"{path}.pass_index", save.pass_index)
    _amount(f"{path}.ordinal", save.ordinal)
    _within(f"{path}.packed", save.packed, 0, end)
    _within(f"{path}.dropped", save.dropped, save.packed, end)
    _all_within(f"{path}.reads", save.reads, save.packed, save.dropped)
    for name, numbers in (("shape", save.shape), ("stride", save.stride)):
        if numbers and min(numbers) < 0:
            for index, number in enumerate(numbers):
                _amount(f"{path}.{name}[{index}]", number)
    _amount(f"{path}.offset", save.offset)


def _hardware(hardware: HardwareProfile, prefix: str) -> None:
    for index, capacity in enumerate(hardware.capacities):
        _amount(f"{prefix}capacities[{index}].nbytes", capacity.nbytes)
    for index, link in enumerate(hardware.links):
        _link(f"{prefix}links[{index}]", link)
    if hardware.managed is not None:
        for name in ("out", "back", "fault"):
            _link(f"{prefix}managed.{name}", getattr(hardware.managed, name))
    _amount(f"{prefix}outside_bytes", hardware.outside_bytes)
    _amount(f"{prefix}hook_s", hardware.hook_s)
    allocator = hardware.allocator
    if allocator.round_bytes < 1:
        _fail(f"{prefix}allocator.round_bytes", f"{allocator.round_bytes} is not at least 1")
    _amount(f"{prefix}allocator.margin_fraction", allocator.margin_fraction)
    _amount(f"{prefix}allocator.margin_bytes", allocator.margin_bytes)
    _amount(f"{prefix}allocator.settled_bytes", allocator.settled_bytes)


def _link(path: str, link: Link) -> None:
    if not link.curve:
        _fail(f"{path}.curve", "empty: at least one measured size is needed")
    for index, (_, rate) in enumerate(link.curve):
        if not 0 < rate < math.inf:
            _fail(f"{path}.curve[{index}]", f"a rate of {rate} bytes per second")
    sizes = [0, *(nbytes for nbytes, _ in link.curve)]
    for index, (before, after) in enumerate(pairwise(sizes)):
        if before >= after:
            _fail(f"{path}.curve[{index}]", f"{after} bytes do not follow {before}: not ascending")
    if not 0 < link.duplex_bytes_per_s < math.inf:
        _fail(f"{path}.duplex_bytes_per_s", f"{link.duplex_bytes_per_s} is not a rate")
    _amount(f"{path}.latency_s", link.latency_s)
    _amount(f"{path}.issue_s", link.issue_s)


def _run(run: Run) -> None:
    """What the plan, the prediction and the measurement name is in the trace."""
    trace, predicted, measured = run.trace, run.predicted, run.measured
    if run.plan.trace != trace.fingerprint:
        raise PlanMismatchError(
            f"the plan of this run is for trace {run.plan.trace}, its trace is {trace.fingerprint}"
        )
    ops = len(trace.ops)
    _plan(run.plan, trace)
    if len(predicted.curve) not in (0, ops):
        _fail("predicted.curve", f"{len(predicted.curve)} numbers for {ops} ops")
    _within("predicted.peak_op", predicted.peak_op, 0, max(0, ops - 1))
    _events("predicted", predicted, trace)
    if measured is not None:
        _events("measured", measured, trace)
        _each_within("measured.held", measured.held, "boundary", 0, ops)
        for index, held in enumerate(measured.held):
            if not -_LONGEST_S <= held.seconds <= _LONGEST_S:
                _moment(f"measured.held[{index}].seconds", held.seconds)


def _plan(plan: Plan, trace: Trace) -> None:
    end = len(trace.ops)
    for index, assignment in enumerate(plan.assignments):
        path, decision = f"plan.assignments[{index}]", assignment.decision
        _within(f"{path}.value", assignment.value, 0, len(trace.values) - 1)
        for name in _BOUNDARIES[type(decision)]:
            _within(f"{path}.decision.{name}", getattr(decision, name), 0, end)
        if isinstance(decision, Offload):
            _within(f"{path}.decision.copy_out_after", decision.copy_out_after, -1, end)
        elif isinstance(decision, Recompute):
            _all_within(f"{path}.decision.ops", decision.ops, 0, end - 1)
    for index, edit in enumerate(plan.order_edits):
        _within(f"plan.order_edits[{index}].op", edit.op, 0, end - 1)
        _within(f"plan.order_edits[{index}].before", edit.before, 0, end)
    for index, storages in enumerate(plan.reuse_classes):
        _all_within(f"plan.reuse_classes[{index}]", storages, 0, len(trace.storages) - 1)
    for index, (op, _) in enumerate(plan.layer_algorithms):
        _within(f"plan.layer_algorithms[{index}][0]", op, 0, end - 1)


def _events(name: str, side: Timeline | Measured, trace: Trace) -> None:
    named: dict[str, Sequence[Span | Stall]] = {"spans": side.spans, "stalls": side.stalls}
    for kind, events in named.items():
        path = f"{name}.{kind}"
        _each_within(path, events, "op", -1, len(trace.ops))
        _each_within(path, events, "value", -1, len(trace.values) - 1)
    for index, span in enumerate(side.spans):
        if not -_LONGEST_S <= span.start_s <= span.end_s <= _LONGEST_S:
            found = f"from {span.start_s} to {span.end_s} seconds"
            _fail(f"{name}.spans[{index}]", f"{found}, which cannot be drawn")
    for index, stall in enumerate(side.stalls):
        if not -_LONGEST_S <= stall.start_s <= _LONGEST_S:
            _moment(f"{name}.stalls[{index}].start_s", stall.start_s)
        if not 0 <= stall.seconds <= _LONGEST_S:
            path = f"{name}.stalls[{index}].seconds"
            _fail(path, f"{stall.seconds} is not between 0 and {_LONGEST_S:g}")


def _moment(path: str, seconds: float) -> None:
    if not -_LONGEST_S <= seconds <= _LONGEST_S:
        _fail(path, f"{seconds} is not between {-_LONGEST_S:g} and {_LONGEST_S:g}")
