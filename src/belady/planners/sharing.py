"""Values that a replay of another passes: made there once, and held until they are read.

Backward reads the values of a block last first, and each of them is made again from where the block
begins. Alone, each replay runs what those before it have run: of five in a row the first op runs
five times. Where there is room, what one passes stays for the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from belady.ir.plan import Recompute
from belady.ir.replay import seconds_of, shares
from belady.ir.trace import Trace
from belady.planners.spread import Bytes


def held(
    trace: Trace,
    replays: Mapping[int, Recompute],
    ways: Mapping[int, list[int]],
    nbytes: Mapping[int, int],
    slack: Bytes,
) -> frozenset[int]:
    """Recomputed values to be held from where a replay passes them, for which there is room.

    Those that save most seconds for their bytes come first.

    Parameters
    ----------
    ways
        What is passed, see `passing`.
    nbytes
        Device bytes of each of ``replays``.
    slack
        Bytes left over during each op.
    """
    slack, found = slack.copy(), set[int]()
    gain = {
        value: len(boundaries) * seconds_of(trace, replays[value]) / nbytes[value]
        for value, boundaries in ways.items()
    }
    for value in sorted(ways, key=lambda v: (-gain[v], v)):
        first, last = min(ways[value]), replays[value].at
        if (slack[first:last] >= nbytes[value]).all():
            slack[first:last] -= nbytes[value]
            found.add(value)
    return frozenset(found)


def unshared(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, Recompute]:
    """Of each replay the ops that no other one runs at its boundary: what is spared without it."""
    if not shares(trace):
        return {**replays}
    runs = Counter((it.at, op) for it in replays.values() for op in it.ops)
    return {
        value: replace(it, ops=tuple(op for op in it.ops if runs[it.at, op] == 1))
        for value, it in replays.items()
    }


def passing(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, list[int]]:
    """Boundaries at which a value is made on the way to another, before its own replay."""
    made: dict[int, list[int]] = {}
    for value in replays:
        made.setdefault(trace.values[value].producer, []).append(value)
    found: dict[int, list[int]] = {}
    for value, replay in replays.items():
        for op in replay.ops:
            for other in made.get(op, ()):
                if other != value and replay.at < replays[other].at:
                    found.setdefault(other, []).append(replay.at)
    return found
