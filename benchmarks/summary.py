"""README's tables: what peers take within their caps, and ours in no more memory. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple

from benchmarks.cases import Record
from benchmarks.comparison import cases, compared, title_of
from benchmarks.judged import SAME, Row, does_not_fit, in_its_cap
from benchmarks.records import machine

# Who is beside us with whose kernels, by the method of plain with these: what most would pick.
_PEERS = {
    "plain": ("checkpoint", "checkpoint+save_on_cpu", "save_on_cpu", "trl"),
    "inductor": ("inductor-0.7", "inductor-0.5", "inductor-0.25", "inductor+checkpoint"),
}
_TITLES = {
    "plain": "Eager kernels",
    "inductor": "Inductor's kernels",
}


class _Beside(NamedTuple):
    """A peer within its smallest cap, and ours in no more memory.

    Attributes
    ----------
    ours
        The fastest that ran without flushes, if there is one.
    otherwise
        What is said where there is none.
    """

    peer: Row
    ours: Row | None
    otherwise: str

    @property
    def ratio(self) -> float:
        """Seconds of ours over the peer's; infinite without any."""
        return self.ours.seconds / self.peer.seconds if self.ours else inf

    @property
    def is_faster(self) -> bool:
        """Whether ours is, by more than runs of one case differ."""
        return self.ratio < 1 - SAME

    @property
    def is_slower(self) -> bool:
        """Whether ours is slower, by more than that."""
        return self.ours is not None and self.ratio > 1 + SAME


def tables(found: Iterable[Record]) -> str:
    """Markdown: a table for each kind of kernels, a row for each workload on each machine."""
    settings = [cases(of) for _, of in compared(found)]
    parts = []
    for plain, peers in _PEERS.items():
        lines, pairs = list[str](), list[_Beside]()
        for ran, failed in settings:
            beside = [_beside(name, ran, failed) for name in peers]
            if any(beside):
                lines.append(_line(_named(ran[0].first), _plain(plain, ran), beside))
                pairs += filter(None, beside)
        if pairs:
            head = "| workload | " + " | ".join((plain, *peers)) + " |\n"
            head += "|---" * (len(peers) + 2) + "|\n"
            parts.append(f"**{_TITLES[plain]}.** {_said(pairs)}\n\n{head}{''.join(lines)}")
    return "\n".join(parts) or "No records yet.\n"


def _beside(name: str, ran: Sequence[Row], failed: Sequence[Row]) -> _Beside | None:
    """The peer of that name, if it passed a smallest cap."""
    found = (row for row in _of(name, ran) if row.first.get("budget") == "smallest")
    peer = next(found, None)
    if peer is None or peer.flushes:
        return None
    inside = in_its_cap(peer, [row for row in ran if row.ours])
    fitting = [row for row in inside if not row.flushes]
    fastest = min(fitting, key=lambda row: row.seconds, default=None)
    refused = does_not_fit(peer, failed)
    otherwise = "does not fit" if refused else "flushes" if inside else "?"
    return _Beside(peer, fastest, otherwise)


def _of(name: str, rows: Iterable[Row]) -> Iterator[Row]:
    return (row for row in rows if row.first["method"] == name)


def _plain(name: str, rows: Iterable[Row]) -> str:
    """Milliseconds of plain with these kernels, without a cap; nothing where that is not known."""
    seconds = [row.seconds for row in _of(name, rows) if not row.capped]
    return f"{min(seconds) * 1e3:.0f}" if seconds else ""


def _named(record: Record) -> str:
    """A setting and the device it was measured on."""
    device, _ = machine(record)
    return f"{title_of(record)} ({device.removeprefix('NVIDIA ').partition(' ')[0]})"


def _line(name: str, plain: str, beside: Iterable[_Beside | None]) -> str:
    return f"| {' | '.join((name, plain, *map(_cell, beside)))} |\n"


def _cell(it: _Beside | None) -> str:
    if it is None:
        return ""
    cap, theirs = f"in {it.peer.cap_bytes / 2**30:.2f}", f"{it.peer.seconds * 1e3:.0f}"
    ours = it.otherwise if it.ours is None else f"{it.ours.seconds * 1e3:.0f}"
    slower = " (slower)" if it.is_slower else ""
    return f"{theirs} → {f'**{ours}**' if it.is_faster else ours}{slower} {cap}"


def _said(pairs: Sequence[_Beside]) -> str:
    """Of how many peers' caps ours is faster in, as one sentence."""
    judged = [it for it in pairs if it.ours is not None]
    faster, slower = sum(it.is_faster for it in judged), sum(it.is_slower for it in judged)
    others = Counter(it.otherwise for it in pairs if it.ours is None)
    told = ", ".join(f"`{word}` in {count} more" for word, count in sorted(others.items()))
    said = f"Ours is faster in {faster} of {len(judged)} caps and slower in {slower}"
    return f"{said}; {told}." if told else f"{said}."
