"""Average memory beside vDNN's figures of it, as a table. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from benchmarks.cases import Record
from benchmarks.comparison import by_machine
from benchmarks.founders.claims import AVERAGE_LESS
from benchmarks.founders.details import gib
from benchmarks.judged import Row

GROUP = "average"
_HEAD = (
    "| network | method | budget | network-wide GiB | average GiB | sampled GiB | less "
    "| less, but for parameters | vDNN's | time |\n"
    f"{'|---' * 10}|\n"
)


def table(found: Iterable[Record]) -> str:
    """Markdown: a row for each case, a table for each machine; what did not run says why."""
    parts = []
    for title, of in by_machine("", (it for it in found if it.get("group") == GROUP)):
        nets: dict[str, dict[tuple[str, str], list[Record]]] = {}
        for record in of:
            cases = nets.setdefault(record["workload"], {})
            cases.setdefault((record["method"], record["budget"]), []).append(record)
        about = f"**{title.removeprefix(', ')}**\n\n" if title else ""
        lines = [line for cases in nets.values() for line in _lines(cases)]
        parts += [about + _HEAD + "".join(lines)] if lines else []
    return "\n".join(parts) or "No records yet.\n"


def _lines(cases: dict[tuple[str, str], list[Record]]) -> Iterable[str]:
    """Rows of one network; network-wide is the most that a plan that runs no slices says.

    Those for less memory ask for less workspace.
    """
    every = [record for records in cases.values() for record in records]
    whole = [it["network_wide"] for it in every if "network_wide" in it and not it["numerics"]]
    wide = max(whole, key=lambda it: sum(it.values()), default=None)
    rows = {name: Row(tuple(records)) for name, records in cases.items()}
    plain = rows.get(("plain", "none"))
    for row in rows.values():
        if row.first["outcome"] != "ok":
            cells = [row.first["outcome"]] + [""] * 6
        else:
            cells = [*_memory(row, wide), _time(row, plain)]
        yield f"| {' | '.join([*_name(row.first), *cells])} |\n"


def _name(record: Record) -> list[str]:
    """Network, method and budget; slices change the order of sums, and are said."""
    how = "".join(f" ({name})" for name in record.get("numerics", ()))
    cap = record.get("budget_bytes")
    budget = record["budget"] if cap is None else f"{record['budget']}: {gib(cap)} GiB"
    return [record["workload"], record["method"] + how, budget]


def _memory(row: Row, wide: Record | None) -> list[str]:
    """All columns but time; a peer knows of nothing but its peak."""
    published = f"{AVERAGE_LESS[row.first['workload']]}%"
    if wide is None or not _has(row, "average_bytes"):
        return ["", "", "", "", "", published]
    held, lasting = _of(row, "average_bytes"), _of(row, "average_persistent_bytes")
    total = sum(wide.values())
    return [
        gib(total),
        gib(held),
        gib(_of(row, "sampled_average_bytes") if _has(row, "sampled_average_bytes") else None),
        f"{1 - held / total:.0%}",
        f"{1 - (held - lasting) / (total - wide['persistent']):.0%}",
        published,
    ]


def _has(row: Row, name: str) -> bool:
    return any(name in record for record in row.records)


def _of(row: Row, name: str) -> int:
    """Median of the rounds that came to something."""
    return int(median(record[name] for record in row.records if name in record))


def _time(row: Row, plain: Row | None) -> str:
    if plain is None or plain.first["outcome"] != "ok":
        return ""
    return f"{row.seconds / plain.seconds - 1:+.1%}"
