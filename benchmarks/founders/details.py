"""Every simulated plan of every network. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.cases import OURS, Record

_BUDGETS = {
    "machine": "in the machine's {} GiB",
    "paper": "in the paper's {} GiB",
    "share": "at the paper's share, {} GiB",
    "smallest": "in the least",
}


def details(plans: list[Record]) -> Iterator[str]:
    """A table for each network on each machine: a row a policy."""
    of: dict[tuple[str, str, int], list[Record]] = {}
    for record in plans:
        if record["outcome"] != "absent":
            name = record["machine"], record["workload"], record["batch"]
            of.setdefault(name, []).append(record)
    for (machine, net, batch), found in of.items():
        kept = next(r for r in found if r["speed"] == "nominal")
        yield (
            f"**{net}, batch {batch}, {machine}**: all kept {kept['oracle_seconds']:.3f} s, peak "
            f"{gib(kept['baseline_peak_bytes'])}, average {gib(kept['baseline_average_bytes'])} "
            f"GiB\n\n{_table(found)}"
        )


def _table(found: list[Record]) -> str:
    budgets = {r["budget"]: r["budget_bytes"] for r in in_order(found)}
    titles = [_BUDGETS[name].format(gib(nbytes)) for name, nbytes in budgets.items()]
    head = ["policy", *(part for title in titles for part in (title, "average")), "how"]
    lines = [f"| {' | '.join(head)} |\n{'|---' * len(head)}|\n"]
    for method in dict.fromkeys(r["method"] for r in found):
        same = [r for r in found if (r["method"], r["speed"]) == (method, "nominal")]
        by_budget = {r["budget"]: (_time(r, found), gib(r.get("average_bytes"))) for r in same}
        cells = [part for budget in budgets for part in by_budget.get(budget, ("", ""))]
        how = _how(in_order(same))
        lines.append(f"| {' | '.join([method.removeprefix(OURS), *cells, how])} |\n")
    return "".join(lines)


def in_order(found: list[Record]) -> list[Record]:
    """Records by budget, as the tables show them."""
    return sorted(found, key=lambda record: [*_BUDGETS].index(record["budget"]))


def _time(record: Record, among: list[Record]) -> str:
    least = f"{gib(record['budget_bytes'])} GiB: " if record["budget"] == "smallest" else ""
    return least + slower(record, among)


def slower(record: Record, among: list[Record]) -> str:
    """How much slower than with everything kept; in brackets at the speed that the paper printed.

    Second in the brackets: with as many bytes as its system held. ``among`` holds the records of
    the same plan at these speeds, if there are any.
    """
    if record["outcome"] != "simulated":
        return "does not fit"
    same = [found for speed in ("printed", "held") for found in at_speed(record, among, speed)]
    there = [f"{overhead(found):+.1%}" for found in same if found["outcome"] == "simulated"]
    return f"{overhead(record):+.1%}" + (f" ({', '.join(there)})" if there else "")


def at_speed(record: Record, among: list[Record], speed: str) -> list[Record]:
    """The record of the same policy and budget at that speed, if there is one."""
    name = record["method"], record["budget"], speed
    return [r for r in among if (r["method"], r["budget"], r["speed"]) == name][:1]


def overhead(record: Record) -> float:
    """Share of time that the plan takes more than everything kept."""
    return float(record["simulated_seconds"] / record["oracle_seconds"] - 1)


def moved(record: Record) -> tuple[int, int]:
    """Bytes that leave the device, and that return."""
    by_lane = {lane: nbytes for lane, nbytes, _ in record.get("moved", ())}
    return by_lane.get("copy-out", 0), by_lane.get("copy-in", 0)


def _how(same: list[Record]) -> str:
    """Slices and order of the plans, and what the integer program says of them."""
    said: dict[str, list[str]] = {}
    fit = [record for record in same if record["outcome"] == "simulated"]
    for record in fit:
        ways = [] if record["way"] == "as it is" else [record["way"]]
        if record["method"].endswith("tvdnn_ilp") and record["reason"]:
            ways.append(record["reason"].removeprefix("moved: tvDNN's "))
        said.setdefault("; ".join(ways), []).append(record["budget"])
    return "<br>".join(
        ways if len(budgets) == len(fit) else f"{', '.join(budgets)}: {ways}"
        for ways, budgets in said.items()
        if ways
    )


def gib(nbytes: int | None) -> str:
    """Gibibytes, with two digits."""
    return "" if nbytes is None else f"{nbytes / 2**30:.2f}"
