"""Why no planner can move a value: the rules of `belady.planners.moves.movable`, in words."""

from __future__ import annotations

from typing import NamedTuple

from belady.ir.residency import next_anchor
from belady.ir.trace import StorageKind, Trace, Value
from belady.planners.moves import MIN_BYTES, read_by
from belady.units import format_bytes


class Stay(NamedTuple):
    """Why a value stays: in two or three words, to count such values, and in a sentence."""

    kind: str
    why: str


def why_it_stays(trace: Trace, index: int) -> Stay | None:
    """Say why value ``index`` cannot move; None if it can."""
    value = trace.values[index]
    storage = trace.storages[value.storage]
    if storage.persistent:
        kind = "optimizer state" if storage.kind is StorageKind.STATE else f"a {storage.kind}"
        return Stay("not an activation", f"it is {kind}, which never leaves the device")
    if not value.saves:
        return Stay("not saved", "autograd does not save it: it is gone when its readers are done")
    if storage.nbytes < MIN_BYTES:
        why = f"{format_bytes(storage.nbytes)} are less than the {format_bytes(MIN_BYTES)} "
        return Stay("too small", f"{why}that are worth a copy")
    siblings = sharing(trace, index)
    read = [v for v in siblings if trace.values[v].first_read is not None]
    if len(read) > 1:
        return Stay(
            "bytes read as several values",
            f"backward reads its bytes as several saved values ({', '.join(map(str, read))}), and "
            "each would come back as a copy of all the bytes",
        )
    for other in sorted(siblings, key=lambda v: v != index):
        found = _never_away(trace, trace.values[other])
        if found is not None:
            same = f"value {other} has the same bytes and stays: "
            return found if other == index else Stay(found.kind, same + found.why)
    return None


def sharing(trace: Trace, index: int) -> tuple[int, ...]:
    """Saved values of the storage of value ``index``, itself included."""
    contents = trace.contents[trace.values[index].storage]
    return tuple(sorted(v for v in contents if trace.values[v].saves))


def _never_away(trace: Trace, value: Value) -> Stay | None:
    """Why its bytes would be off the device for no op; None if they could be."""
    storage, back = trace.storages[value.storage], read_by(value)
    if storage.released >= back:
        who = "the caller" if storage.kind is StorageKind.INPUT else "something besides autograd"
        until = "to the end of the iteration"
        if storage.released < len(trace.ops):
            until = f"until {trace.locate(storage.released)}"
        return Stay(
            "held by others",
            f"{who} holds it {until}, so that a copy elsewhere would free nothing before backward "
            "reads it",
        )
    if next_anchor(trace, value.first_save + 1) >= back:
        return Stay("read back at once", "backward reads it before its bytes could be let go")
    return None
