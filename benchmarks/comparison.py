"""Ours beside peers, as a table that says who is faster in the same memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from benchmarks.cases import BOUND, LAUNCHED, Record, flushes
from benchmarks.judged import NOTABLE, Row, verdict
from benchmarks.records import machine

GROUPS = ("frontier", "peers", "targets")
# A setting with records of these has enough points for a figure, of all its records.
PLOTTED = ("frontier", "peers")
# Caps that are the same share of what two runs of plain held at their peaks.
_SAME_CAP = 0.002
_HEAD = (
    "| method | cap GiB | ms (median) | in a row | bound ms | peak GiB | reserved GiB | host GiB "
    "| retries | equals plain | ours in no more memory, same kernels | measured |\n"
    f"{'|---' * 12}|\n"
)
_REASON_LENGTH = 80
LEGEND = (
    "Below, ours is judged within what each peer needs, beside peers that run the same kernels: "
    "eager mode's, or\nInductor's. Times are waited for, and a verdict says what holds in a row "
    f"where that differs by {NOTABLE:.0%} of the\npeer's time or more. Where the allocator "
    "flushed its cache, a method did not pass the cap and counts in no verdict.\nWhat ran without "
    "a cap is not judged, as its cache idles in part. The bound is what no plan behind hooks can "
    "beat in that cap, of\nwhat runs in no slices, even if nothing were lost between blocks. "
    "Captured graphs and slices have that of their own trace.\nThose of a few caps can be of "
    "another run than others.\n"
)


def plotted(found: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Those of `compared` that make a figure, of two methods at least."""
    for title, of in compared(found):
        methods = {it["method"] for it in of if it["outcome"] == "ok"} - {BOUND}
        if len(methods) > 1 and any(record["group"] in PLOTTED for record in of):
            yield title, of


def compared(found: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Those of `settings` that peers were measured on."""
    yield from settings(record for record in found if record.get("group") in GROUPS)


def settings(found: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Title and records of each workload in one setting on one machine."""
    by_setting: dict[str, list[Record]] = {}
    for record in found:
        by_setting.setdefault(title_of(record), []).append(record)
    for name, of in by_setting.items():
        yield from by_machine(name, of)


def by_machine(name: str, found: Iterable[Record]) -> Iterator[tuple[str, list[Record]]]:
    """Records of one machine each; the title says which where there are several."""
    by: dict[str, list[Record]] = {}
    for record in found:
        device, torch = machine(record)
        by.setdefault(f"{device}, torch {torch}" if device else "", []).append(record)
    if len(by.keys() - {""}) < 2:
        yield name, [record for of in by.values() for record in of]
        return
    for about, of in by.items():
        # Of before crashes named their machine.
        yield f"{name}, {about or 'unknown device'}", of


def title_of(record: Record) -> str:
    """The setting of a record, without its machine."""
    sizes = "".join(f", {name} {value}" for name, value in record.get("sizes", {}).items())
    layout = ", channels_last" if record.get("channels_last") else ""
    toy = ", toy size" if record.get("toy") else ""
    chosen = "" if record.get("cudnn_benchmark", True) else ", cuDNN untimed"
    seed = f", seed {record['seed']}" if record.get("seed") else ""
    return f"{record['workload']}{sizes}, {record.get('precision')}{layout}{toy}{chosen}{seed}"


def cases(found: Iterable[Record]) -> tuple[list[Row], list[Row]]:
    """Cases of one setting that ran, the largest cap first, and those that came to nothing."""
    by: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        if record["method"] != BOUND:
            by.setdefault((record["method"], str(record.get("budget"))), []).append(record)
    rows = [Row(tuple(_apart(records))) for records in by.values()]
    ran = sorted((row for row in rows if _ok(row)), key=lambda row: -row.cap_bytes)
    return ran, [row for row in rows if not _ok(row)]


def table(found: Sequence[Record]) -> str:
    """Markdown: a row for each case of one setting; what did not run says why."""
    bounds: dict[str, Record] = {}
    for record in found:
        if record["method"] == BOUND:
            bounds.setdefault(record["budget"], record)
    ran, failed = cases(found)
    ours = [row for row in ran if row.ours]
    lines = []
    for row in ran:
        judged = "" if row.ours or not row.capped else verdict(row, ours, failed)
        lines.append(_line(row, _bound(row, bounds.get(row.bounded_by, {})), judged))
    lines += [_failed(record) for row in failed for record in row.failed]
    return _HEAD + "".join(lines)


def _apart(records: list[Record]) -> list[Record]:
    """Those of processes of their own, if any are: what cuDNN takes stays with a process."""
    return [it for it in records if not it.get("shared")] or records


def _ok(row: Row) -> bool:
    return all(record["outcome"] == "ok" for record in row.records)


def _bound(row: Row, known: Record) -> float | None:
    """Seconds of the bound; None in another cap, as where a peer's grew while it was measured.

    Captured graphs and slices have that of their own trace.
    """
    if "own_bound_seconds" in row.first:
        return float(row.first["own_bound_seconds"])
    cap, seconds = known.get("budget_bytes"), known.get("bound_seconds")
    alike = cap is not None and abs(cap - row.cap_bytes) <= _SAME_CAP * cap
    return seconds if alike else None


def _line(row: Row, bound: float | None, judged: str) -> str:
    first = row.first
    host = first.get("host_bytes", first.get("torch_pinned_bytes"))
    cells = (
        first["method"],
        _gib(first.get("budget_bytes")) or "none",
        _ms(row.seconds),
        _ms(row.in_a_row),
        _ms(bound),
        _gib(_peak(first)),
        _gib(first.get("peak_reserved_bytes")),
        _gib(host),
        retries(row.records),
        _equals_plain(row),
        judged,
        measured(row.records),
    )
    return f"| {' | '.join(cells)} |\n"


def measured(records: Iterable[Record]) -> str:
    """When that was, how many at once on a host, and whose plan of ours; empty where unknown."""
    return "; ".join(filter(None, dict.fromkeys(map(_occasion, records))))


def _occasion(record: Record) -> str:
    planner = str(record.get("planner", "")).removeprefix("auto:")
    at_once = f"{record['at_once']} at once" if record.get("at_once") else ""
    parts = (str(record.get("date", ""))[:10], planner, at_once)
    return ", ".join(part for part in parts if part)


def _peak(record: Record) -> int | None:
    """Bytes allocated, which torch does not count of the graphs that a peer launches."""
    return None if record["method"].endswith(LAUNCHED) else record["peak_allocated_bytes"]


def retries(records: Iterable[Record]) -> str:
    """How often the allocator flushed its cache, in a word where it did."""
    told = [record for record in records if "allocation_retries" in record]
    count = flushes(told)
    return f"flushes: {count}" if count else "0" if told else ""


def _equals_plain(row: Row) -> str:
    if row.first["method"] == "plain":
        return ""
    judged = [record for record in row.records if "equal" in record]
    if not judged:
        found = "not compared"
    elif not all(record.get("plain_repeats", True) for record in judged):
        found = "plain does not repeat"
    else:
        found = "yes" if all(record["equal"] for record in judged) else "no"
    numerics = row.first.get("numerics")
    return f"{found} ({', '.join(numerics)})" if numerics else found


def _failed(record: Record) -> str:
    error = str(record.get("error", "")).strip().rsplit("\n", 1)[-1]
    reason = f"{record['outcome']}: {error[:_REASON_LENGTH]}".replace("|", "/").rstrip(": ")
    return f"| {record['method']} | {record.get('budget', '')} | {reason} |{' |' * 9}\n"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f}"
