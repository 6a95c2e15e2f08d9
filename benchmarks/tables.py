"""Verb ``tables``: writes the figures of README.md from the committed records.

The text between the markers is generated; ``--check`` fails when it differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from benchmarks.cases import Record
from benchmarks.records import committed

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--check", action="store_true", help="fail where a page differs")


def run(arguments: argparse.Namespace) -> int:
    """Write or check the section; gives an exit status."""
    path = ROOT / "README.md"
    text = path.read_text("utf-8")
    wanted = with_figures(text, figures(committed()))
    if arguments.check:
        if wanted != text:
            print("README.md differs from benchmarks/results: run `python -m benchmarks tables`")
        return int(wanted != text)
    path.write_text(wanted, "utf-8")
    return 0


def with_figures(text: str, section: str) -> str:
    """The text with the section between the markers replaced."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{section}{END}{after}"


def figures(found: list[Record]) -> str:
    """The section: one table a group."""
    machine = sorted({f"{r['device_name']}, torch {r['torch']}" for r in found if "torch" in r})
    groups = [
        ("fits", "Everything fits (ResNet-50, batch 256, bf16, channels_last; processes in turn)"),
        ("save_on_cpu", "ResNet-50, batch 256, bf16, NCHW, at small budgets"),
        ("founders", "vDNN's policies, each under a hard cap of its predicted peak plus margin"),
    ]
    parts = [f"Measured on: {'; '.join(machine)}.\n"]
    for group, title in groups:
        of = [r for r in found if r.get("group") == group]
        if of:
            parts.append(f"**{title}**\n\n{_table(of)}")
    return "\n".join(parts)


def _table(found: Iterable[Record]) -> str:
    head = (
        "| workload | precision | method | cap GiB | ms (median) | predicted | peak GiB "
        "| predicted | reserved | retries |\n"
        f"{'|---' * 10}|\n"
    )
    return head + "".join(f"| {' | '.join(_row(r))} |\n" for r in found)


def _row(record: Record) -> list[str]:
    cap = record.get("budget_bytes")
    name = record["workload"]
    if record["outcome"] != "ok":
        return [name, record.get("precision", ""), record["method"], _gib(cap), record["outcome"],
                "", "", "", "", ""]  # fmt: skip
    return [
        name,
        record["precision"],
        record["method"],
        _gib(cap) if cap is not None and cap < 2**39 else "none",
        _ms(record["median_seconds"]),
        _ms(record.get("predicted_seconds")),
        _gib(record["peak_allocated_bytes"]),
        _gib(record.get("predicted_peak_bytes")),
        _gib(record["peak_reserved_bytes"]),
        str(record["allocation_retries"]),
    ]


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f}"


def _gib(count: int | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f}"
