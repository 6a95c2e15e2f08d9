"""Which bytes a plan could have away from the device, when, and at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from belady.errors import TierError
from belady.ir.codecs import passes
from belady.ir.encoding import encoding_of
from belady.ir.hardware import HardwareProfile, Link
from belady.ir.plan import Encode, Recompute
from belady.ir.replay import closure, seconds_of, shares
from belady.ir.residency import reload_end
from belady.ir.trace import Tier, Trace, Value
from belady.simulate.routes import routes


@dataclass(frozen=True, slots=True)
class Movable:
    """Bytes that may be away during ops ``start <= i < end`` if their value is moved.

    Attributes
    ----------
    value
        The value to move; -1 when moving another one is enough and costs nothing more.
    nbytes
        Device bytes saved, allocator rounding included.
    out_s, in_s
        Least seconds of lone link that the two copies take.
    release, deadline
        Boundaries between which both copies happen; a replay happens at the deadline.
    again_s
        Least seconds of compute that it takes to have the bytes made again instead, or decoded.
    """

    value: int
    start: int
    end: int
    nbytes: int
    out_s: float = 0.0
    in_s: float = 0.0
    release: int = 0
    deadline: int = 0
    again_s: float = inf


@dataclass(frozen=True, slots=True)
class Ports:
    """Links by which values can leave the device and come back, one lane each."""

    out: tuple[Link, ...]
    back: tuple[Link, ...]


def ports(hardware: HardwareProfile) -> Ports:
    """First links of every way out of the device, last links of every way back."""
    out: list[Link] = []
    back: list[Link] = []
    for tier in (Tier.HOST, Tier.DISK):
        if hardware.capacity(tier) <= 0:
            continue
        try:
            there, again = routes(hardware, tier)
        except TierError:
            continue
        out += [link for _, link in there[:1] if link not in out]
        back += [link for _, link in again[-1:] if link not in back]
    return Ports(tuple(out), tuple(back))


def movable(trace: Trace, hardware: HardwareProfile, links: Ports) -> list[Movable]:
    """All that could be saved; never less than any plan does save."""
    by_storage: dict[int, list[int]] = {}
    for index in trace.saved:
        by_storage.setdefault(trace.values[index].storage, []).append(index)
    found: list[Movable] = []
    again = _again(trace)
    for storage, values in by_storage.items():
        asked = trace.storages[storage].nbytes
        nbytes = hardware.allocator.held(asked)
        out_s = min((link.seconds(asked) for link in links.out), default=inf)
        in_s = min((link.seconds(asked) for link in links.back), default=inf)
        for value, (start, end) in _windows(trace, storage, values).items():
            if nbytes and value < 0:
                found.append(Movable(value, start, end, nbytes))
            elif nbytes:
                times = trace.values[value].first_save, _last(trace.values[value])
                again_s = min(again.get(value, inf), _decoded(trace, hardware, value))
                if links.out or again_s < inf:
                    new = Movable(value, start, end, nbytes, out_s, in_s, *times, again_s)
                    found.append(new)
    return found


def _again(trace: Trace) -> dict[int, float]:
    """Least seconds of a replay of each saved value that has one.

    Where replays share ops, each of those counts for its part among all that may run it.
    """
    closures = {
        value: found
        for value in trace.saved
        if (found := closure(trace, value, lambda _: True, len(trace.ops))) is not None
    }
    shared = Counter(op for it in closures.values() for op in it.ops)
    if not shares(trace):
        shared = Counter(dict.fromkeys(shared, 1))
    return {
        value: sum(seconds_of(trace, Recompute((op,), it.at)) / shared[op] for op in it.ops)
        for value, it in closures.items()
    }


def _decoded(trace: Trace, hardware: HardwareProfile, value: int) -> float:
    """Seconds of decoding, as if all bytes had been saved at the price of those that are.

    What encoding takes comes earlier, where it gives copies time: without it the bound is lower.
    """
    encoding, read = encoding_of(trace, value), trace.values[value].first_read
    if encoding is None or read is None:
        return inf
    nbytes = trace.storages[trace.values[value].storage].nbytes
    decision = Encode(*encoding, trace.values[value].first_save, read)
    seconds = hardware.memory_seconds(passes(decision, nbytes).decode)
    held = hardware.allocator.held(nbytes)
    left = hardware.allocator.held(encoding.nbytes)
    return seconds * held / (held - left) if left < held else inf


def _last(value: Value) -> int:
    """Boundary by which an offloaded value is back."""
    return value.dropped if value.first_read is None else value.first_read


def _windows(trace: Trace, storage: int, values: list[int]) -> dict[int, tuple[int, int]]:
    """Ops during which the bytes of a storage may be away, by the value on which it depends.

    Where it depends on several values, one stands for all; where the pieces of one value do not
    touch, the window covers what is between: both only make the bound lower.
    """
    windows: dict[int, tuple[int, int]] = {}
    for value, start, end in _pieces(trace, storage, values):
        first = windows[value][0] if value in windows else start
        windows[value] = (first, end)
    return windows


def _pieces(trace: Trace, storage: int, indices: list[int]) -> Iterator[tuple[int, int, int]]:
    it = trace.storages[storage]
    values = [trace.values[index] for index in indices]
    points = {max(it.birth, it.released), it.death}
    for value in values:
        points |= {value.first_save, _last(value), value.dropped, reload_end(trace, value)}
    inside = sorted(p for p in points if max(it.birth, it.released) <= p <= it.death)
    for start, end in pairwise(inside):
        live = [index for index in indices if trace.values[index].dropped > start]
        if not live:
            # All is dropped and nobody else holds it: bytes that were reloaded may be gone.
            if any(reload_end(trace, value) <= start for value in values):
                yield -1, start, end
        elif all(trace.values[i].first_save <= start < _last(trace.values[i]) for i in live):
            yield live[0], start, end
