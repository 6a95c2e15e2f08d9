"""The founders' figures beside ours, as tables. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from benchmarks.cases import OURS, SIMULATED, Record
from benchmarks.founders.claims import CLAIMS, Claim

_CLAIMS = (
    "| published | not to be taken for | `auto` there, simulated | `auto` here, measured |\n"
    "|---|---|---|---|\n"
)
_DETAILS = (
    "| machine | network | batch | all kept: peak, average GiB | policy | its memory "
    "| average GiB | in GiB at least | average GiB |\n"
    f"{'|---' * 9}|\n"
)
# What stands for ours in the first table.
_METHOD = OURS + "auto"


def table(found: Iterable[Record]) -> str:
    """Markdown: a section a system, a row a claim; then every simulated plan."""
    known = list(found)
    parts: list[str] = []
    for system in dict.fromkeys(claim.system for claim in CLAIMS):
        rows = [_row(claim, known) for claim in CLAIMS if claim.system == system]
        parts.append(f"**{system}**\n\n{_CLAIMS}{''.join(rows)}")
    details = "".join(_details(known))
    if details:
        parts.append(f"**Every policy, simulated**\n\n{_DETAILS}{details}")
    return "\n".join(parts)


def _row(claim: Claim, known: list[Record]) -> str:
    cells = (
        f"{claim.published} [{claim.source}]",
        claim.trap,
        _joined(claim, [_simulated(claim.machine, net, known) for net in claim.nets]),
        _joined(claim, [_measured(net[0], known) for net in claim.nets]),
    )
    return f"| {' | '.join(cells)} |\n"


def _joined(claim: Claim, texts: list[str]) -> str:
    if len(texts) > 1:
        named = zip(claim.nets, texts, strict=True)
        texts = [f"{net}: {text}" for (net, _), text in named]
    return "<br>".join(texts) or "–"


def _simulated(machine: str, net: tuple[str, int], known: list[Record]) -> str:
    of = _of(machine, net, known)
    if not of:
        return "not simulated"
    if of[0]["outcome"] == "absent":
        return f"absent: {of[0]['error']}"
    texts = [f"{_plan(r)} in {_gib(r['budget_bytes'])} GiB" for r in of if r["method"] == _METHOD]
    return f"{', '.join(texts)}; all kept {_gib(of[0]['baseline_peak_bytes'])} GiB"


def _of(machine: str, net: tuple[str, int], known: list[Record]) -> list[Record]:
    return [
        record
        for record in known
        if record.get("group") == SIMULATED
        and (record["machine"], record["workload"], record["batch"]) == (machine, *net)
    ]


def _details(known: list[Record]) -> Iterable[str]:
    """A row for each policy: in the machine's memory, and in the smallest budget it states."""
    plans: dict[tuple[str, str, int, str], dict[str, Record]] = {}
    for record in known:
        if record.get("group") == SIMULATED and record["outcome"] != "absent":
            name = (record["machine"], record["workload"], record["batch"], record["method"])
            plans.setdefault(name, {})[record["budget"]] = record
    for (machine, net, batch, method), by_budget in plans.items():
        given, least = by_budget["machine"], by_budget["smallest"]
        kept = f"{_gib(given['baseline_peak_bytes'])}, {_gib(given['baseline_average_bytes'])}"
        cells = (
            machine,
            net,
            str(batch),
            kept,
            method.removeprefix(OURS),
            _plan(given),
            _gib(given.get("average_bytes")),
            f"{_plan(least)} in {_gib(least['budget_bytes'])}",
            _gib(least.get("average_bytes")),
        )
        yield f"| {' | '.join(cells)} |\n"


def _plan(record: Record) -> str:
    """How much slower than with everything kept."""
    if record["outcome"] != "simulated":
        return "does not fit"
    slower = record["simulated_seconds"] / record["oracle_seconds"] - 1
    return f"{slower:+.1%} time"


def _measured(net: str, known: list[Record]) -> str:
    """What a device measured of the network, against plain in the same setting."""
    of: dict[tuple[str, ...], list[Record]] = {}
    for record in known:
        if record["workload"] == net and record["outcome"] == "ok" and not record.get("toy"):
            setting = [str(record.get(name)) for name in ("precision", "channels_last", "sizes")]
            about = (*setting, _plain_name(record), str(record.get("budget")))
            of.setdefault(about, []).append(record)
    texts = []
    for (*setting, method, budget), same in of.items():
        plain = of.get((*setting, "plain", "none"))
        if method != _METHOD or plain is None or "median_seconds" not in same[0]:
            continue
        slower = _seconds(same) / _seconds(plain) - 1
        texts.append(
            f"{same[0]['device_name']}, {setting[0]}, budget {budget}: {slower:+.1%} time, peak "
            f"{_gib(same[0]['peak_allocated_bytes'])} of {_gib(plain[0]['peak_allocated_bytes'])} "
            "GiB"
        )
    return "; ".join(texts) or "not measured beside plain"


def _plain_name(record: Record) -> str:
    """The method; records of before methods had a prefix call ours by the policy alone."""
    method = str(record["method"])
    return OURS + method if "planner" in record and ":" not in method else method


def _seconds(same: list[Record]) -> float:
    return median(record["median_seconds"] for record in same)


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.2f}"
