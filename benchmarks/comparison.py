"""Ours beside peers, as a table that says who is faster in the same memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks.cases import BOUND, OWN, Record

GROUPS = ("frontier", "peers", "targets")
# A setting with records of these has enough points for a figure, of all its records.
PLOTTED = ("frontier", "peers")
# What is called the same: repeated runs of one case differ by about so much.
_SAME = 0.01
_HEAD = (
    "| method | cap GiB | ms (median) | peak GiB | reserved GiB | host GiB | retries "
    "| equals plain | ours in no more memory |\n"
    f"{'|---' * 9}|\n"
)
_REASON_LENGTH = 80


@dataclass(frozen=True)
class Row:
    """All rounds of one case."""

    records: tuple[Record, ...]

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def ours(self) -> bool:
        return str(self.first["method"]).startswith(OWN)

    @property
    def seconds(self) -> float:
        return median(record["median_seconds"] for record in self.records)

    @property
    def cap_bytes(self) -> int:
        """The cap, or what was reserved where there was none."""
        first = self.first
        reserved = first.get("peak_reserved_bytes", first["peak_allocated_bytes"])
        return int(first.get("budget_bytes", reserved))


def plotted(found: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Those of `compared` that make a figure."""
    for title, of in compared(found):
        if any(record["group"] in PLOTTED for record in of):
            yield title, of


def compared(found: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Title and records of each workload in one setting that peers were measured on."""
    by_setting: dict[str, list[Record]] = {}
    for record in found:
        if record.get("group") in GROUPS:
            by_setting.setdefault(_title(record), []).append(record)
    yield from by_setting.items()


def _title(record: Record) -> str:
    sizes = "".join(f", {name} {value}" for name, value in record.get("sizes", {}).items())
    layout = ", channels_last" if record["channels_last"] else ""
    toy = ", toy size" if record.get("toy") else ""
    return f"{record['workload']}{sizes}, {record['precision']}{layout}{toy}"


def table(found: Iterable[Record]) -> str:
    """Markdown: a row for each case; what did not run says why."""
    cases: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        if record["method"] != BOUND:
            cases.setdefault((record["method"], str(record.get("budget"))), []).append(record)
    rows = [Row(tuple(records)) for records in cases.values()]
    measured = sorted((row for row in rows if _ok(row)), key=lambda row: -row.cap_bytes)
    ours = [row for row in measured if row.ours]
    failed = [row for row in rows if not _ok(row)]
    lines = [_line(row, ours, failed) for row in measured]
    lines += [_failed(row.first) for row in failed]
    return _HEAD + "".join(lines)


def _ok(row: Row) -> bool:
    return all(record["outcome"] == "ok" for record in row.records)


def _line(row: Row, ours: list[Row], failed: list[Row]) -> str:
    first = row.first
    host = first.get("host_bytes", first.get("torch_pinned_bytes"))
    equal = {True: "yes", False: "no", None: ""}[first.get("equal")]
    if first.get("numerics"):
        equal += f" ({', '.join(first['numerics'])})"
    cells = (
        first["method"],
        _gib(first.get("budget_bytes")) or "none",
        f"{row.seconds * 1e3:.1f}",
        _gib(first["peak_allocated_bytes"]),
        _gib(first.get("peak_reserved_bytes")),
        _gib(host),
        str(first.get("allocation_retries", "")),
        equal,
        "" if row.ours else verdict(row, ours, failed),
    )
    return f"| {' | '.join(cells)} |\n"


def verdict(peer: Row, ours: Iterable[Row], failed: Iterable[Row] = ()) -> str:
    """Who is faster within the peer's cap, in plain words.

    Parameters
    ----------
    failed
        Cases that came to nothing: of ours at the very cap of the peer, it did not fit.
    """
    within = [row for row in ours if row.cap_bytes <= peer.cap_bytes]
    if not within:
        cap = f"100%:{peer.first['method']}"
        tried = any(row.ours and row.first.get("budget") == cap for row in failed)
        return "**does not fit**" if tried else "not measured"
    ratio = min(row.seconds for row in within) / peer.seconds
    if ratio < 1 - _SAME:
        return f"{1 - ratio:.0%} faster"
    if ratio > 1 + _SAME:
        return f"**{ratio - 1:.0%} slower**"
    return "the same"


def _failed(record: Record) -> str:
    error = str(record.get("error", "")).strip().rsplit("\n", 1)[-1]
    reason = f"{record['outcome']}: {error[:_REASON_LENGTH]}".replace("|", "/").rstrip(": ")
    return f"| {record['method']} | {record.get('budget', '')} | {reason} |{' |' * 6}\n"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f}"
