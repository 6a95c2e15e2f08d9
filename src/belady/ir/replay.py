"""What may be recomputed, and from what: the rules of `belady.ir.plan.Recompute`.

A replay runs at the value's first read in backward, or before it, where another replay starts from
the value or runs the same ops. It starts from bytes that are on the device then and are what they
were: parameters and buffers that nobody has written, and saved values that autograd goes on to
hold, made again themselves or not.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple

from belady.ir.codecs import SIGN
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Decision, Encode, Managed, Offload, Recompute
from belady.ir.residency import away, times_saved
from belady.ir.trace import Phase, Source, Trace

# A device that works in its own time is not held up to compare replays: one in so many is compared,
# in turn. On a CPU each one is; where results must be exact as well, which no prediction contains.
COMPARED_ONE_IN = 8

# What is wrong, and with which op; -1 where no single one is meant.
Reason = tuple[str, int]


def compared_share(trace: Trace) -> float:
    """Share of iterations in which one replay is compared with what was saved.

    Nothing is in a graph, where what runs in forward is what was captured.
    """
    if trace.source is Source.GRAPH:
        return 0.0
    return 1.0 if trace.device == "cpu" else 1 / COMPARED_ONE_IN


def hook_seconds(trace: Trace, hardware: HardwareProfile) -> float:
    """Seconds of the host for the hooks of a value that is not kept; graphs have none."""
    return 0.0 if trace.source is Source.GRAPH else hardware.hook_s


def reasons(trace: Trace, index: int, decisions: Mapping[int, Decision]) -> Iterator[Reason]:
    """Why the Recompute of value ``index`` may not run beside the other ``decisions``."""
    decision = decisions[index]
    if not isinstance(decision, Recompute):
        return
    wrong = [*_ops_wrong(trace, index, decision)]
    yield from wrong
    yield from refusals(trace, index, decision.at)
    if wrong or decision.at > (trace.values[index].first_read or 0):
        return
    made: set[int] = set()
    for op in decision.ops:
        if why := irreproducible(trace, op):
            yield f"{trace.locate(op)} cannot be replayed: it {why}", op
        if why := overwrites(trace, op, made):
            yield f"{trace.locate(op)} {why}", op
        for source in trace.replays[op].reads:
            if source not in made:
                why = unavailable(trace, source, index, decision.at) or _elsewhere(
                    trace, source, decision.at, decisions.get(source)
                )
                if why:
                    yield f"{trace.locate(op)} reads value {source}, which {why}", op
        made.update(trace.replays[op].writes)


def sources(trace: Trace, decision: Recompute) -> tuple[int, ...]:
    """Values that a replay reads and does not write itself, in the order in which it reads them."""
    key = sources, decision.ops
    known: tuple[int, ...] | None = trace.worked_out.get(key)
    if known is None:
        made: set[int] = set()
        found: dict[int, None] = {}
        for op in decision.ops:
            again = trace.replays[op]
            found |= dict.fromkeys(value for value in again.reads if value not in made)
            made.update(again.writes)
        known = trace.worked_out[key] = tuple(found)
    return known


def refusals(trace: Trace, index: int, at: int) -> Iterator[Reason]:
    """Why value ``index`` can by no replay be dropped and be back at boundary ``at``."""
    value = trace.values[index]
    if value.first_read is None or at > value.first_read:
        read = "never reads it" if value.first_read is None else f"reads it at {value.first_read}"
        yield f"recomputed at {at}, but backward {read}", -1
        return
    for other in trace.contents[value.storage]:
        if other != index and trace.values[other].saves:
            yield f"value {other} of its storage is saved too and would not come back with it", -1
    times = [*times_saved(value)]
    if len(times) > 1:
        yield f"it is let go at {times[0][1]} and saved again", -1
    gone, back = away(trace, index, Recompute((), at))
    if gone >= back or trace.storages[value.storage].nbytes == 0:
        yield f"its bytes would be off the device for no op: gone at {gone}, back at {back}", -1


def closure(
    trace: Trace, index: int, usable: Callable[[int], bool], longest: int
) -> Recompute | None:
    """Fewest ops that make value ``index`` again, part of every replay that does; None if none may.

    Parameters
    ----------
    usable
        Whether a replay may start from a saved value.
    longest
        Most ops that it may have.
    """
    at = trace.values[index].first_read
    if at is None or any(refusals(trace, index, at)):
        return None
    ops: set[int] = set()
    pending = [trace.values[index].producer]
    while pending:
        op = pending.pop()
        if op in ops:
            continue
        if op < 0 or len(ops) == longest or irreproducible(trace, op):
            return None
        ops.add(op)
        behind = {predecessor(trace, output) for output in trace.replays[op].writes} - {None}
        behind |= {
            source
            for source in trace.replays[op].reads
            if unavailable(trace, source, index, at)
            or not (trace.storages[trace.values[source].storage].persistent or usable(source))
        }
        pending += [trace.values[before].producer for before in behind if before is not None]
    found = Recompute(tuple(sorted(ops)), at)
    return None if any(reasons(trace, index, {index: found})) else found


def seconds_of(trace: Trace, replay: Recompute) -> float:
    """Seconds that compute is busy with a replay; on a CPU it issues the ops as well."""
    seconds = sum(trace.replays[op].device_seconds for op in replay.ops)
    if trace.device != "cpu":
        return seconds
    return seconds + sum(trace.ops[op].host_seconds for op in replay.ops)


def shares(trace: Trace) -> bool:
    """Whether what replays make stays for those after them at the same boundary.

    So each op runs once in a graph. Behind hooks each replay is alone.
    """
    return trace.source is Source.GRAPH


def run_by(trace: Trace, decision: Recompute, ran: set[int]) -> list[int]:
    """The ops that a replay runs after those at its boundary that ``ran`` some; it adds its own."""
    ops = [op for op in decision.ops if op not in ran]
    if shares(trace):
        ran.update(ops)
    return ops


def at_once(trace: Trace, decisions: Mapping[int, Decision]) -> list[list[tuple[int, Recompute]]]:
    """Replays at one boundary, in order, where they share what they make; else each alone."""
    found = [(v, it) for v, it in decisions.items() if isinstance(it, Recompute)]
    if not shares(trace):
        return [[it] for it in found]
    together: dict[int, list[tuple[int, Recompute]]] = {}
    for value, it in sorted(found, key=lambda each: each[1].ops[-1:]):
        together.setdefault(it.at, []).append((value, it))
    return [*together.values()]


def irreproducible(trace: Trace, op: int) -> str:
    """Why op ``op`` cannot be run again; empty if it can."""
    it = trace.ops[op]
    if it.phase not in (Phase.FORWARD, Phase.LOSS):
        return f"is of phase {it.phase.value}"
    if it.communicates:
        return "communicates"
    if it.random and it.shortcut is None:
        return "draws random numbers"
    if not it.replayable:
        return "is not replayable"
    for output in it.replay.writes:
        storage = trace.storages[trace.values[output].storage]
        if storage.persistent:
            return f"writes value {output}, a {storage.kind.value}"
    return ""


def overwrites(trace: Trace, op: int, made: Container[int]) -> str:
    """Which content op ``op`` would overwrite that the replay did not make; empty if none."""
    for output in trace.replays[op].writes:
        before = predecessor(trace, output)
        if before is not None and before not in made:
            return f"writes value {output} over bytes that the replay has not written"
    return ""


def predecessor(trace: Trace, index: int) -> int | None:
    """Value that value ``index`` was written over, None for new bytes."""
    contents = trace.contents[trace.values[index].storage]
    at = contents.index(index)
    return contents[at - 1] if at else None


def unavailable(trace: Trace, source: int, index: int, at: int) -> str:
    """Why no replay of value ``index`` at ``at`` may start from value ``source``; empty if it may.

    Decisions are not considered: this is the case in which every other value is kept.
    """
    value = trace.values[source]
    for other in trace.contents[value.storage]:
        writer = trace.values[other].producer
        if value.producer < writer < at:
            return f"{trace.locate(writer)} overwrites before boundary {at}"
    if trace.storages[value.storage].persistent:
        return ""
    if not value.saves:
        return "autograd does not save"
    its, wanted = _saved(trace, source), _saved(trace, index)
    if its.first > wanted.first:
        return f"autograd saves only after value {index}"
    held = any(start < at < end for start, end in its.times)
    if not held or its.dropped < wanted.dropped:
        return f"autograd lets go at {its.dropped}, before it is done with value {index}"
    return ""


class _Saved(NamedTuple):
    """How long autograd holds a value: its first save in order, each time, and the last drop."""

    first: tuple[int, int, int]
    times: tuple[tuple[int, int], ...]
    dropped: int


def _saved(trace: Trace, index: int) -> _Saved:
    # What all steps of a recurrent network read is saved a thousand times, and asked for in each.
    key = _saved, index
    known: _Saved | None = trace.worked_out.get(key)
    if known is None:
        value = trace.values[index]
        first = min((save.packed, save.pass_index, save.ordinal) for save in value.saves)
        times = tuple((start, end) for start, end, _ in times_saved(value))
        known = trace.worked_out[key] = _Saved(first, times, value.dropped)
    return known


def _elsewhere(trace: Trace, source: int, at: int, decision: Decision | None) -> str:
    """Why the bytes of a saved value are not on the device at ``at``; empty if they are."""
    if isinstance(decision, Managed):
        return "is in managed memory"
    if isinstance(decision, Recompute) and decision.at > at:
        return f"is itself made again at {decision.at} only, after boundary {at}"
    if isinstance(decision, Encode) and decision.codec == SIGN:
        return "comes back as signs alone"
    if isinstance(decision, Encode) and decision.decode_at > at:
        return f"is decoded at {decision.decode_at} only, after boundary {at}"
    if isinstance(decision, Offload):
        _, back = away(trace, source, decision)
        if back > at:
            return f"comes back to the device at {back}, after boundary {at}"
    reads = (read for save in trace.values[source].saves for read in save.reads)
    if isinstance(decision, (Offload, Recompute, Encode)) and all(read < at for read in reads):
        return f"is read for the last time before boundary {at}, and then let go"
    return ""


def _ops_wrong(trace: Trace, index: int, decision: Recompute) -> Iterator[Reason]:
    ops, count = decision.ops, len(trace.ops)
    for op in ops:
        if not 0 <= op < count:
            yield f"op {op} does not exist: the trace has {count}", op
            return
    if list(ops) != sorted(set(ops)):
        yield f"the ops {list(ops)} are not in ascending order", -1
    if not ops:
        yield "there is no op to replay", -1
    elif index not in trace.ops[ops[-1]].replay.writes:
        yield f"{trace.locate(ops[-1])} is replayed last and does not write it", ops[-1]
    elif ops[-1] >= decision.at:
        yield f"{trace.locate(ops[-1])} comes only after boundary {decision.at}", ops[-1]
