"""Verb ``tables``: writes tables and plots of README and docs from the committed records.

The text between the markers of each page is generated; ``--check`` fails when it differs, or when a
plot shows other points or none that there are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median

from benchmarks import average_table, comparison, kernels, plot, summary
from benchmarks.cases import Record
from benchmarks.founders import table as founders
from benchmarks.records import committed

ROOT = Path(__file__).parents[1]
PLOTS = "figures"  # folder beside the page that shows them
_GROUPS = {
    "fits": "Everything fits (ResNet-50, batch 256, bf16, channels_last; processes in turn)",
    "save_on_cpu": "ResNet-50, batch 256, bf16, NCHW, at small budgets",
    "founders": "vDNN's policies, each under a hard cap of its predicted peak plus margin",
    "ocdnn": "OC-DNN's policy in core, at 1/1.1, 1/2 and 1/4 of plain's peak, beside ours",
    "shares": "The default policy at shares of plain's peak, and within 12 GiB",
    "plain": "Plain, other precisions",
    "oracle": "What torch's own switches change for plain: the layout, and whether cuDNN times its "
    "algorithms",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--check", action="store_true", help="fail where a page differs")


def run(arguments: argparse.Namespace) -> int:
    """Write or check all pages; gives an exit status."""
    found = committed()
    wrong = [page for page in PAGES if not _page(page, found, arguments.check)]
    drawn = plots(found)
    if not arguments.check:
        _draw(drawn)
    for path in (*wrong, *differing(drawn)):
        print(f"{path} differs from benchmarks/results: run `python -m benchmarks tables`")
    return int(bool(wrong or differing(drawn)))


def _page(page: str, found: list[Record], check: bool) -> bool:
    """Write one page, or say whether it is as it should be."""
    path = ROOT / page
    text = path.read_text("utf-8")
    wanted = generated(page, text, found)
    if not check:
        path.write_text(wanted, "utf-8")
    return not check or wanted == text


def generated(page: str, text: str, found: list[Record]) -> str:
    """The text of a page with everything between markers replaced."""
    for name, section in PAGES[page].items():
        text = with_section(text, name, section(found))
    return text


def with_section(text: str, name: str, section: str) -> str:
    """The text with the section between the markers of that name replaced."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{section}{end}{after}"


def figures(found: list[Record]) -> str:
    """All rows: one table a group, and one for each workload with peers."""
    shown = [r for r in found if r.get("group") in (*_GROUPS, *comparison.GROUPS)]
    machine = sorted({f"{r['device_name']}, torch {r['torch']}" for r in shown if "torch" in r})
    parts = [f"Measured on: {'; '.join(machine)}.\n"]
    for group, about in _GROUPS.items():
        of_group = [r for r in found if r.get("group") == group]
        for title, of in comparison.by_machine(about, of_group):
            if of:
                parts.append(f"**{title}**\n\n{_table(of)}")
    parts.append(comparison.LEGEND)
    for title, of in comparison.compared(found):
        heading = f"**{title}: the largest cap first**"
        parts.append(f"{heading}\n\n{comparison.table(of)}")
    return "\n".join(parts)


def peers(found: list[Record]) -> str:
    """The section of docs/figures.md with plots."""
    parts = [
        f"**{title}**\n\n![Time of an iteration over memory]({PLOTS}/{_name(title)}.svg)\n"
        for title, _ in comparison.plotted(found)
    ]
    return "\n".join(parts) or "No records yet.\n"


def plots(found: list[Record]) -> dict[Path, list[Record]]:
    """Files of plots, and what each shows."""
    folder = ROOT / "docs" / PLOTS
    return {
        folder / f"{_name(title)}.svg": [record for record in of if record["outcome"] == "ok"]
        for title, of in comparison.plotted(found)
    }


def differing(drawn: Mapping[Path, list[Record]]) -> list[Path]:
    """Files of plots that are not there, show something else, or are not wanted.

    Points are compared, as versions of matplotlib write other bytes.
    """
    wanted = {path: plot.described(plot.points(of)) for path, of in drawn.items()}
    there = {path: plot.description_of(path) for path in _files(drawn)}
    return [path for path in wanted | there if wanted.get(path) != there.get(path)]


def _draw(drawn: Mapping[Path, list[Record]]) -> None:
    from belady.report.plots import frontier, save_figure

    for path in _files(drawn):
        path.unlink()
    for path, of in drawn.items():
        path.parent.mkdir(exist_ok=True)
        points = plot.points(of)
        figure = frontier(points, columns=2, looks=plot.LOOKS)
        save_figure(figure, path, description=plot.described(points))


def _files(drawn: Iterable[Path]) -> list[Path]:
    """Plots that lie beside those that are drawn."""
    return sorted(file for folder in {it.parent for it in drawn} for file in folder.glob("*.svg"))


def _name(title: str) -> str:
    return re.sub(r"[^\w]+", "-", title)


def levels(found: list[Record]) -> str:
    """The section of docs/figures.md on what measuring costs, with a row for cases of ResNet-50."""
    rows, costs = [], []
    for record in found:
        steady, measured = _by_level(record)
        if not steady or not measured or record.get("allocation_retries"):
            continue
        cost = median(measured) / steady - 1
        costs.append(cost)
        if (record["workload"], record["precision"]) == ("resnet50", "bf16"):
            every = record.get("every_event_seconds")
            cells = [record["method"], record["budget"], record["moved_values"], _ms(steady)]
            cells += [_ms(median(measured)), f"{cost:+.1%}", _ms(every)]
            rows.append(f"| {' | '.join(map(str, cells))} |\n")
    if not costs:
        return "No records yet.\n"
    head = (
        "| method | budget | values moved | ms at level 0 | at level 1 | more | at level 2 |\n"
        f"{'|---' * 7}|\n"
    )
    middle = (
        f"Level 1 costs {median(costs):+.1%} (median of all {len(costs)} cases without a retry)."
    )
    return f"{middle}\n\n{head}{''.join(rows)}"


def _by_level(record: Record) -> tuple[float | None, list[float]]:
    """Seconds at level 0 and at level 1: in turn, or before, as plans were verified."""
    rows = record.get("level_rows")
    if rows is None:
        return record.get("pipelined_seconds"), record.get("verified_seconds") or []
    return median(rows["0"]), rows["1"]


_LANES = {"copy-out": ["device", "host"], "copy-in": ["host", "device"]}
_FAST = 0.9


def lanes(found: list[Record]) -> str:
    """The section of docs/figures.md on the rates of copies, with a row for each slow lane."""
    # Managed memory goes by prefetch, which the probe measures apart.
    managed = ("ocdnn_opt", "ocdnn_naive")
    told = [it for it in found if it.get("links") and not it["method"].endswith(managed)]
    copied = [(record, lane) for record in told for lane in record.get("lanes", ())]
    copied = [(record, lane) for record, lane in copied if lane["lane"] in _LANES]
    if not copied:
        return "No records yet.\n"
    probed = {lane: _probed(found, ends) for lane, ends in _LANES.items()}
    shares, rows = [], []
    for record, lane in copied:
        shares.append([lane["bytes_per_s"] / rate for rate in probed[lane["lane"]]])
        if shares[-1][0] < _FAST:
            names = ("workload", "precision", "method", "budget")
            cells = [*(record[name] for name in names), lane["lane"], lane["copies"]]
            cells += [f"{lane['bytes_per_s'] / 1e9:.1f}", *(f"{it:.0%}" for it in shares[-1])]
            rows.append(f"| {' | '.join(map(str, cells))} |\n")
    head = (
        "| workload | precision | method | budget | lane | copies | GB/s | of one way | of both |\n"
        f"{'|---' * 9}|\n"
    )
    fast, least = sum(share >= _FAST for share, _ in shares), min(both for _, both in shares)
    return (
        f"{fast} of {len(shares)} lanes copy at {_FAST:.0%} or more of the rate that the probe "
        f"found for one way alone,\nall at {least:.0%} or more of the rate for "
        f"both ways at once. The others:\n\n{head}{''.join(rows)}"
    )


def _probed(found: list[Record], ends: list[str]) -> list[float]:
    """Rates of a link, one way and both ways.

    Of all records, as some hold links that were corrected by what an iteration showed.
    """
    links = [it[2:] for record in found for it in record.get("links", ()) if it[:2] == ends]
    return [median(rates) for rates in zip(*links, strict=True)]


PAGES: Mapping[str, Mapping[str, Callable[[list[Record]], str]]] = {
    "README.md": {"peers": summary.tables},
    "docs/tables.md": {"figures": figures},
    "docs/figures.md": {
        "frontier": peers,
        "levels": levels,
        "lanes": lanes,
        "average": average_table.table,
        "founders": founders.table,
        "kernels": lambda _: kernels.table(kernels.committed()),
    },
}


def _table(found: Iterable[Record]) -> str:
    head = (
        "| workload | precision | method | cap GiB | ms (median) | predicted | peak GiB "
        "| predicted | reserved | retries | measured |\n"
        f"{'|---' * 11}|\n"
    )
    return head + "".join(f"| {' | '.join(_row(r))} |\n" for r in found)


def _row(record: Record) -> list[str]:
    cap = record.get("budget_bytes")
    layout = ", channels_last" if record.get("channels_last") else ""
    untimed = "" if record.get("cudnn_benchmark", True) else ", cuDNN untimed"
    name = f"{record['workload']}{layout}{untimed}"
    if record["outcome"] != "ok":
        return [name, record.get("precision", ""), record["method"], _gib(cap), record["outcome"],
                "", "", "", "", "", comparison.measured([record])]  # fmt: skip
    return [
        name,
        record["precision"],
        record["method"],
        _gib(cap) if cap is not None and cap < 2**39 else "none",
        _ms(record["median_seconds"]),
        _ms(record.get("predicted_seconds")),
        _gib(record["peak_allocated_bytes"]),
        _gib(record.get("predicted_peak_bytes")),
        _gib(record.get("peak_reserved_bytes")),
        comparison.retries([record]),
        comparison.measured([record]),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"
