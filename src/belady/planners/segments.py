"""Mixes that make whole segments of the network again, as checkpointing does."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from belady.ir.trace import Phase, Trace
from belady.planners.moves import MIN_BYTES

# In how many parts of equal bytes the values are cut; where there is no place to cut, fewer.
_PARTS = (4, 8, 16, 32, 64)


def segmented(
    trace: Trace, nbytes: Mapping[int, int], recomputed: Collection[int]
) -> Iterator[frozenset[int]]:
    """Of what can be ``recomputed`` all but where segments begin; fewer and fewer at once.

    What begins a segment stays or is copied. Chen et al. (arXiv 1604.06174) cut so, by layers.

    Parameters
    ----------
    nbytes
        Device bytes of the values that may move.
    """
    narrow = bottlenecks(trace)
    total, before = sum(nbytes.values()), None
    for parts in _PARTS:
        begins = _cut(trace, nbytes, narrow, total / parts)
        if begins != before:
            yield frozenset(recomputed) - begins
        before = begins


def bottlenecks(trace: Trace) -> set[int]:
    """Values on which all later ops of forward depend, and on no other that was made before.

    Parameters and buffers apart, and what is too small to matter.
    """
    last = _last_reads(trace)
    ends: dict[int, list[int]] = {}
    for value, at in last.items():
        ends.setdefault(at, []).append(value)
    live, found = set[int](), set[int]()
    for index, op in enumerate(trace.ops):
        live.difference_update(ends.get(index, ()))
        live.update(value for value in op.writes if last.get(value, -1) > index)
        if len(live) == 1 and live.issubset(op.writes):
            found |= live
    return found


def _last_reads(trace: Trace) -> dict[int, int]:
    """The last op of forward that reads each value of some size that does not persist."""
    last: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        if op.phase is Phase.FORWARD:
            last |= dict.fromkeys(op.reads, index)
    storages = (trace.storages[trace.values[value].storage] for value in last)
    matters = [not it.persistent and it.nbytes >= MIN_BYTES for it in storages]
    return {value: op for (value, op), it in zip(last.items(), matters, strict=True) if it}


def _cut(
    trace: Trace, nbytes: Mapping[int, int], narrow: Collection[int], most: float
) -> frozenset[int]:
    """Bottlenecks at which segments begin, each of at most so many bytes where that can be.

    Of those that leave a segment half of them at least, the smallest: it stays, or is copied.
    """
    begins, candidates = set[int](), list[tuple[int, int, int]]()
    total = begun = 0
    for value in sorted(nbytes, key=lambda v: (trace.values[v].producer, v)):
        total += nbytes[value]
        if value not in narrow:
            continue
        if total - begun > most and candidates:
            half = [it for it in candidates if 2 * (it[2] - begun) >= most] or candidates[-1:]
            _, begin, begun = min(half, key=lambda it: (it[0], -it[2]))
            begins.add(begin)
            candidates = [it for it in candidates if it[2] > begun]
        candidates.append((nbytes[value], value, total))
    return frozenset(begins)
