"""Which ops to run again for a value, so that as little as possible is computed twice."""

from __future__ import annotations

from collections.abc import Callable

from belady.ir.plan import Recompute
from belady.ir.replay import irreproducible, predecessor, reasons, refusals, unavailable
from belady.ir.trace import Trace

# A longer replay is no longer cheap, and its inputs lie far back.
LONGEST = 8


def _every_value(_: int) -> bool:
    return True


def cheapest(
    trace: Trace, index: int, usable: Callable[[int], bool] = _every_value
) -> Recompute | None:
    """Least that must run again to have value ``index`` back, or None if no replay may.

    Parameters
    ----------
    usable
        Whether a replay may start from a saved value; by default from every one, which is legal
        where all other values are kept.
    """
    value = trace.values[index]
    at = value.first_read
    if at is None or any(refusals(trace, index, at)):
        return None
    ops: set[int] = set()
    pending = [value.producer]
    while pending:
        op = pending.pop()
        if op in ops:
            continue
        if op < 0 or len(ops) == LONGEST or irreproducible(trace, op):
            return None
        ops.add(op)
        behind = {predecessor(trace, output) for output in trace.ops[op].writes} - {None}
        behind |= {
            source
            for source in trace.ops[op].reads
            if unavailable(trace, source, index)
            or not (trace.storages[trace.values[source].storage].persistent or usable(source))
        }
        pending += [trace.values[before].producer for before in behind if before is not None]
    found = Recompute(tuple(sorted(ops)), at)
    return None if any(reasons(trace, index, {index: found})) else found


def seconds_of(trace: Trace, replay: Recompute) -> float:
    """Seconds that compute is busy with a replay; on a CPU it issues the ops as well."""
    host = trace.device == "cpu"
    ops = (trace.ops[op] for op in replay.ops)
    return sum(op.device_seconds + (op.host_seconds if host else 0.0) for op in ops)
