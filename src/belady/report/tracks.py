"""Processes, tracks, arrows and counters of the Trace Event Format; knows nothing of a Run.

Readers take microseconds as doubles and turn them into whole nanoseconds. Times are rounded to
eighths of a microsecond, which survive both, so events that touch never overlap: Perfetto drops
an event that overlaps another one on its thread without lying inside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any, NamedTuple

Event = dict[str, Any]

CATEGORY = "belady"


class Piece(NamedTuple):
    """Something that lasts; those of one ``flow`` of at least 0 are joined by arrows."""

    start_s: float
    end_s: float
    name: str
    args: Event
    flow: int = -1


def microseconds(seconds: float) -> float:
    """Time in the unit of the format, to an eighth of a microsecond."""
    return round(seconds * 8e6) / 8


@dataclass
class Process:
    """A process in the trace, and all that is on its tracks.

    Attributes
    ----------
    order
        Where it stands among processes; tracks stand in the order in which they are made.
    origin_us
        Our moment 0 on the clock of the trace.
    ids
        Numbers that nothing else in the trace has: older readers know a thread by its number
        alone, whatever its process.
    """

    name: str
    order: int
    origin_us: float
    ids: Iterator[int]
    _events: list[Event] = field(default_factory=list)
    _flows: dict[int, list[Event]] = field(default_factory=dict)
    _tracks: int = 0

    def __post_init__(self) -> None:
        self.pid = next(self.ids)
        self._describe("process", self.pid, self.name, self.order)

    def track(self, name: str, category: str, pieces: Iterable[Piece]) -> None:
        """Add a track, and further numbered ones for pieces that overlap."""
        threads: list[int] = []
        free: list[int] = []
        busy: list[tuple[float, int]] = []
        for piece in sorted(pieces, key=lambda piece: piece[:2]):
            start, end = microseconds(piece.start_s), microseconds(piece.end_s)
            while busy and busy[0][0] <= start:
                heappush(free, heappop(busy)[1])
            if not free:
                heappush(free, len(threads))
                threads.append(self._thread(name, len(threads)))
            number = heappop(free)
            heappush(busy, (end, number))
            event = self._event("X", piece.name, start, threads[number], category)
            event |= {"dur": end - start, "args": piece.args}
            self._events.append(event)
            if piece.flow >= 0:
                self._flows.setdefault(piece.flow, []).append(event)

    def counter(self, name: str, points: Iterable[tuple[float, int]]) -> None:
        """Add bytes over time, ``(seconds, bytes)``: of several at one moment the most."""
        most: dict[float, int] = {}
        for seconds, nbytes in points:
            moment = microseconds(seconds)
            most[moment] = max(nbytes, most.get(moment, nbytes))
        before = None
        for moment, nbytes in sorted(most.items()):
            if nbytes != before:
                event = self._event("C", name, moment, self.pid, CATEGORY)
                self._events.append(event | {"args": {"bytes": nbytes}})
            before = nbytes

    def events(self) -> list[Event]:
        """Everything, each arrow's end right after the event that it is bound to."""
        bound: dict[int, list[Event]] = {}
        for flow in self._flows.values():
            for event, end in self._arrows(sorted(flow, key=lambda event: event["ts"])):
                bound.setdefault(id(event), []).append(end)
        return [part for event in self._events for part in (event, *bound.get(id(event), ()))]

    def _arrows(self, flow: list[Event]) -> Iterator[tuple[Event, Event]]:
        """Chains of events that do not overlap; an arrow back in time would say nothing."""
        chains: list[list[Event]] = []
        for event in flow:
            if chains and chains[-1][-1]["ts"] + chains[-1][-1]["dur"] <= event["ts"]:
                chains[-1].append(event)
            else:
                chains.append([event])
        for chain in chains:
            number = next(self.ids)
            for index, event in enumerate(chain if len(chain) > 1 else ()):
                phase = "s" if index == 0 else "f" if index == len(chain) - 1 else "t"
                end = {**event, "ph": phase, "name": "copy", "cat": CATEGORY, "id": number}
                del end["dur"], end["args"]
                yield event, end if phase == "s" else end | {"bp": "e"}

    def _thread(self, name: str, number: int) -> int:
        thread = next(self.ids)
        title = f"{name} {number + 1}" if number else name
        self._describe("thread", thread, title, self._tracks)
        self._tracks += 1
        return thread

    def _describe(self, kind: str, thread: int, name: str, order: int) -> None:
        for key, args in (("name", {"name": name}), ("sort_index", {"sort_index": order})):
            about = {"ph": "M", "name": f"{kind}_{key}", "pid": self.pid, "tid": thread}
            self._events.append({**about, "args": args})

    def _event(self, phase: str, name: str, moment: float, thread: int, category: str) -> Event:
        event: Event = {"ph": phase, "cat": category, "name": name, "pid": self.pid, "tid": thread}
        return event | {"ts": self.origin_us + moment}
