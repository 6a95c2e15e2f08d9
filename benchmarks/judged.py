"""One case of a table, and who of two is faster in the same memory. Imports no torch.

Methods are judged beside those that run the same kernels, and only where the allocator never had to
flush its cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import ENGINES, OURS, OWN, Record, capped, flushes, kernels_of

# What is called the same: repeated runs of one case differ by about so much.
SAME = 0.01
# By how much waiting for each iteration must change a ratio for both to be told.
NOTABLE = 0.02
UNKNOWN = "not measured"


@dataclass(frozen=True)
class Row:
    """All rounds of one case."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def failed(self) -> tuple[Record, ...]:
        """The first round that came to nothing, if one did."""
        return tuple(it for it in self.records if it["outcome"] != "ok")[:1]

    @property
    def ours(self) -> bool:
        return str(self.first["method"]).startswith(OWN)

    @property
    def kernels(self) -> str:
        return kernels_of(self.first["method"])

    @property
    def seconds(self) -> float:
        return median(record["median_seconds"] for record in self.records)

    @property
    def in_a_row(self) -> float | None:
        """Seconds of an iteration that nobody waits for; None where that was not measured."""
        found = [it["pipelined_seconds"] for it in self.records if "pipelined_seconds" in it]
        return median(found) if found else None

    @property
    def bounded_by(self) -> str:
        """Budget of the bound in the same cap, a peer's smallest being 100 % of it.

        Empty for captured graphs, which have no hooks to wait for, and for Inductor's kernels.
        """
        method, budget = self.first["method"], str(self.first.get("budget"))
        if self.kernels != ENGINES[OURS] or (self.ours and not method.startswith(OURS)):
            return ""
        return f"100%:{method}" if budget == "smallest" and not self.ours else budget

    @property
    def flushes(self) -> int:
        return flushes(self.records)

    @property
    def capped(self) -> bool:
        """Whether it was to do with less than there is."""
        return capped(self.first)

    @property
    def cap_bytes(self) -> int:
        """The cap, or what was reserved where there was none."""
        first = self.first
        reserved = first.get("peak_reserved_bytes", first["peak_allocated_bytes"])
        return int(first.get("budget_bytes", reserved))


def verdict(peer: Row, ours: Iterable[Row], failed: Iterable[Row] = ()) -> str:
    """Who is faster within the peer's cap with the same kernels, in plain words.

    In a row as well, where that says something else.

    Parameters
    ----------
    failed
        Cases that came to nothing: of ours at the very cap of the peer, it did not fit.
    """
    if peer.flushes:
        return "not judged"
    inside = in_its_cap(peer, ours)
    fitting = [row for row in inside if not row.flushes]
    if not fitting:
        refused = does_not_fit(peer, failed)
        return "**does not fit**" if refused else "**only with flushes**" if inside else UNKNOWN
    ratio = min(row.seconds for row in fitting) / peer.seconds
    in_rows = [row.in_a_row for row in fitting if row.in_a_row is not None]
    if not in_rows or peer.in_a_row is None:
        return _words(ratio)
    in_a_row = min(in_rows) / peer.in_a_row
    if abs(in_a_row - ratio) < NOTABLE:
        return _words(ratio)
    return f"{_words(ratio)}; in a row {_words(in_a_row)}"


def in_its_cap(peer: Row, ours: Iterable[Row]) -> list[Row]:
    """Those of ours with the peer's kernels that ran in no more memory, with flushes or without."""
    return [it for it in ours if it.kernels == peer.kernels and it.cap_bytes <= peer.cap_bytes]


def does_not_fit(peer: Row, failed: Iterable[Row]) -> bool:
    """Whether ours, asked for the very cap of the peer with its kernels, came to nothing."""
    cap = f"100%:{peer.first['method']}"
    at_its_cap = [row for row in failed if row.ours and row.first.get("budget") == cap]
    return any(row.kernels == peer.kernels for row in at_its_cap)


def _words(ratio: float) -> str:
    if ratio < 1 - SAME:
        return f"{1 - ratio:.0%} faster"
    if ratio > 1 + SAME:
        return f"**{ratio - 1:.0%} slower**"
    return "the same"
