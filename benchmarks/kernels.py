"""Verb ``kernels``: what replays, digests, cuDNN's algorithms and copies beside kernels cost here.

Each question is one record. The planners take what they need from a trace; these records say why
they are built as they are, and whether a device still agrees.
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks import memsets, options, pooling, records, sliced
from benchmarks.beside import copies
from benchmarks.cases import Record
from benchmarks.questions import OF_KERNELS, Asked

QUESTIONS = {
    **OF_KERNELS,
    "copies": copies,
    "slices": sliced.slices,
    "memsets": memsets.memsets,
    "pooling": pooling.pooling,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("out", type=options.writable, help="JSON lines; answers are added")
    parser.add_argument("--question", action="append", choices=QUESTIONS, help="all unless given")
    parser.add_argument("--device", default="cuda", help="or cpu, where no setting matters")
    parser.add_argument("--repeats", type=int, default=9, help="of which the median counts")
    parser.add_argument("--images", type=int, default=128, help="samples of a feature map")
    parser.add_argument("--edge", type=int, default=224, help="pixels, of what is convolved")


def run(arguments: argparse.Namespace) -> int:
    """Ask every question and print the answers."""
    device = torch.device(arguments.device)
    if device.type == "cuda" and device.index is None:
        # A limit on memory is of one device by its number.
        device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    about = {"device_name": name, "torch": str(torch.__version__)}
    asked = Asked(device, arguments.images, arguments.edge, arguments.repeats)
    for question in arguments.question or QUESTIONS:
        for answer in QUESTIONS[question](asked):
            record = {"verb": "kernels", **about, **answer}
            records.append(arguments.out, record)
            print(json.dumps(answer), flush=True)
    return 0


def committed() -> list[Record]:
    """All committed answers."""
    files = sorted((records.RESULTS / "kernels").glob("*.jsonl"))
    return [record for file in files for record in records.read(file)]


def table(found: list[Record]) -> str:
    """The section of docs/figures.md."""
    if not found:
        return "No records yet.\n"
    machines = sorted({f"{record['device_name']}, torch {record['torch']}" for record in found})
    rows = [_row(record) for record in found if record["what"] not in _APART]
    head = "| what | how | ms for a GiB | shortcut | same bits |\n"
    lines = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    parts = [f"Measured on: {'; '.join(machines)}.\n", f"{head}{'|---' * 5}|\n{lines}"]
    parts += [
        shown(answers)
        for what, shown in _APART.items()
        if (answers := [record for record in found if record["what"] == what])
    ]
    return "\n".join(parts)


def _row(record: Record) -> list[str]:
    names = ("way", "op", "precision" if "precision" in record else "dtype")
    how = [str(record[name]) for name in names if name in record]
    if record.get("channels_last"):
        how.append("channels_last")
    same = [record[name] for name in ("same_bits", "shortcut_same_bits") if name in record]
    return [
        record["what"],
        ", ".join(how),
        _ms(record.get("s_per_gib", record.get("s"))),
        _ms(record.get("shortcut_s_per_gib")),
        "" if not same else "yes" if all(same) else "NO",
    ]


def _convolutions(found: list[Record]) -> str:
    """A row for each convolution and a column for each setting: milliseconds, MiB of workspace."""
    rows: dict[str, dict[str, str]] = {}
    for record in found:
        setting = _setting(record)
        if setting:
            layout = "channels_last" if record.get("channels_last") else "NCHW"
            name = f"{record['way']}, {record.get('precision', '')}, {layout}"
            rows.setdefault(name, {})[setting] = _cell(record)
    settings = list(dict.fromkeys(setting for cells in rows.values() for setting in cells))
    lines = [
        f"| {' | '.join([name, *(cells.get(setting, '') for setting in settings)])} |\n"
        for name, cells in rows.items()
    ]
    head = f"| ms, MiB of workspace | {' | '.join(settings)} |\n{'|---' * (len(settings) + 1)}|\n"
    return head + "".join(lines)


def _copies(found: list[Record]) -> str:
    """A row for each kind of kernels and a column for each way: GB/s, and the share of alone."""
    alone = {_way(record): record["s_per_gib"] for record in found if _is_alone(record)}
    rows: dict[str, dict[str, str]] = {}
    for record in found:
        seconds, way = record["s_per_gib"], _way(record)
        share = f", {alone[way] / seconds:.0%}" if way in alone and not _is_alone(record) else ""
        rows.setdefault(record["beside"], {})[way] = f"{2**30 / seconds / 1e9:.1f}{share}"
    ways = list(dict.fromkeys(way for cells in rows.values() for way in cells))
    lines = [
        f"| {' | '.join([name, *(cells.get(way, '') for way in ways)])} |\n"
        for name, cells in rows.items()
    ]
    return f"| GB/s beside | {' | '.join(ways)} |\n{'|---' * (len(ways) + 1)}|\n{''.join(lines)}"


def _way(record: Record) -> str:
    return f"{record['way']}, both at once" if record["both"] else str(record["way"])


def _is_alone(record: Record) -> bool:
    return bool(record["beside"] == "nothing")


def _setting(record: Record) -> str:
    """What was set; empty for what the other columns show as well."""
    name = str(record["setting"])
    if name in ("before a limit", "limit lifted"):
        return ""
    if record.get("cap_mib") is not None:
        return f"{name}, CUDNN_CONV_WSCAP_DBG={record['cap_mib']}"
    limit = record.get("limit_mib")
    return name if limit is None else f"limit of {limit} MiB" if name == "limited" else name


def _cell(record: Record) -> str:
    if "error" in record:
        return str(record["error"])
    return f"{record['s'] * 1e3:.1f}, {record['workspace_bytes'] / 2**20:.0f}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.2f}"


# What has a table of its own.
_APART = {
    "convolution": _convolutions,
    "copy": _copies,
    "slice": sliced.table,
    "memset": memsets.table,
    "pooling": pooling.table,
}
