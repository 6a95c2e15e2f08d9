"""README's tables: what peers take within their caps, and ours in no more memory. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from benchmarks import comparison
from benchmarks.cases import Record
from benchmarks.judged import SAME, Row, within
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
    """A peer within its smallest cap, and the fastest of ours in no more memory, if there is one.

    Attributes
    ----------
    fits
        Whether one of ours was measured in that cap at all, with flushes or without.
    """

    peer: Row
    ours: Row | None
    fits: bool

    @property
    def ratio(self) -> float:
        """Seconds of ours over the peer's; infinite without any."""
        return self.ours.seconds / self.peer.seconds if self.ours else float("inf")


def tables(found: Iterable[Record]) -> str:
    """Markdown: a table for each kind of kernels, a row for each workload on each machine."""
    settings = [(title, comparison.rows(of)) for title, of in comparison.compared(found)]
    parts = []
    for plain, peers in _PEERS.items():
        lines, pairs = list[str](), list[_Beside]()
        for title, rows in settings:
            beside = [_beside(name, rows) for name in peers]
            if any(beside):
                lines.append(_line(_named(title, rows), _plain(plain, rows), beside))
                pairs += filter(None, beside)
        if pairs:
            head = "| workload | " + " | ".join((plain, *peers)) + " |\n"
            head += "|---" * (len(peers) + 2) + "|\n"
            parts.append(f"**{_TITLES[plain]}.** {_said(pairs)}\n\n{head}{''.join(lines)}")
    return "\n".join(parts) or "No records yet.\n"


def _beside(name: str, rows: Sequence[Row]) -> _Beside | None:
    """The peer of that name, if it passed a smallest cap that ours was measured in."""
    found = (row for row in _of(name, rows) if row.first.get("budget") == "smallest")
    peer = next(found, None)
    if peer is None or peer.flushes:
        return None
    ours = [row for row in rows if row.ours]
    same = [row for row in ours if row.kernels == peer.kernels and row.cap_bytes <= peer.cap_bytes]
    fitting = within(peer, ours)
    fastest = min(fitting, key=lambda row: row.seconds, default=None)
    return _Beside(peer, fastest, bool(same))


def _of(name: str, rows: Iterable[Row]) -> Iterator[Row]:
    return (row for row in rows if row.first["method"] == name)


def _plain(name: str, rows: Iterable[Row]) -> str:
    """Milliseconds of plain with these kernels, without a cap; nothing where that is not known."""
    seconds = [row.seconds for row in _of(name, rows) if row.first.get("budget") in (None, "none")]
    return f"{min(seconds) * 1e3:.0f}" if seconds else ""


def _named(title: str, rows: Sequence[Row]) -> str:
    """A setting and the device it was measured on."""
    device, _ = machine(rows[0].first)
    name = device.removeprefix("NVIDIA ").split(" ")[0]
    return f"{title.partition(', NVIDIA')[0]} ({name})"


def _line(name: str, plain: str, beside: Iterable[_Beside | None]) -> str:
    return f"| {' | '.join((name, plain, *map(_cell, beside)))} |\n"


def _cell(it: _Beside | None) -> str:
    if it is None:
        return ""
    cap = f"in {it.peer.cap_bytes / 2**30:.2f}"
    theirs = f"{it.peer.seconds * 1e3:.0f}"
    if it.ours is None:
        return f"{theirs} → {'flushes' if it.fits else '?'} {cap}"
    ours = f"{it.ours.seconds * 1e3:.0f}"
    return f"{theirs} → {f'**{ours}**' if it.ratio < 1 else ours} {cap}"


def _said(pairs: Sequence[_Beside]) -> str:
    """Of how many peers' caps ours is faster in, as one sentence."""
    judged = [it.ratio for it in pairs if it.ours is not None]
    faster, slower = sum(it < 1 - SAME for it in judged), sum(it > 1 + SAME for it in judged)
    flushing = sum(it.fits for it in pairs) - len(judged)
    return (
        f"Ours is faster in {faster} of {len(judged)} caps and slower in {slower}; in {flushing} "
        f"more it ran with flushes only, and in {len(pairs) - len(judged) - flushing} it was not "
        "measured."
    )
