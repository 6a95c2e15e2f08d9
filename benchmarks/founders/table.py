"""The founders' figures beside ours, as tables."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import Any

from belady.planners import traits_of
from benchmarks.cases import OURS, SIMULATED, Record, flushes
from benchmarks.founders import printed
from benchmarks.founders.claim import Claim, Net
from benchmarks.founders.claims import CLAIMS
from benchmarks.founders.details import details, gib, in_order, moved, slower
from benchmarks.founders.machines import MACHINES
from benchmarks.records import machine

_CLAIMS = (
    "| published | not to be taken for | time there, simulated | where that comes from "
    "| `auto` here, measured |\n"
    f"{'|---' * 5}|\n"
)
# What stands for ours beside the policy of each paper.
_METHOD = OURS + "auto"
_NOMINAL = "nominal"


def table(found: Iterable[Record]) -> str:
    """Markdown: machines; what was printed beside what is predicted; systems; every plan."""
    known = list(found)
    plans = [record for record in known if record.get("group") == SIMULATED]
    machines = (f"| {it.name} | {it.sources} |\n" for it in MACHINES.values())
    parts = ["| machine | from |\n|---|---|\n" + "".join(machines)]
    parts.append(printed.table(plans))
    for system in dict.fromkeys(claim.system for claim in CLAIMS):
        rows = [_row(claim, known, plans) for claim in CLAIMS if claim.system == system]
        parts.append(f"**{system}**\n\n{_CLAIMS}{''.join(rows)}")
    return "\n".join([*parts, *details(plans)])


def _row(claim: Claim, known: list[Record], plans: list[Record]) -> str:
    of = [printed.of(claim, net, plans) for net in claim.nets]
    cells = (
        f"{claim.published} [{claim.source}]",
        claim.trap,
        _joined(claim, [_simulated(claim, found) for found in of]),
        _joined(claim, list(map(_from, [claim] * len(of), claim.nets, of))),
        _joined(claim, [_measured(net, known) for net in claim.nets]),
    )
    return f"| {' | '.join(cells)} |\n"


def _joined(claim: Claim, texts: list[str]) -> str:
    if len(texts) > 1:
        named = zip(claim.nets, texts, strict=True)
        texts = [f"{net.workload}, {net.batch}: {text}" for net, text in named]
    return "<br>".join(texts) or "not simulated: see above"


def _simulated(claim: Claim, of: list[Record]) -> str:
    """The paper's policy and the default one, in each budget."""
    if not of:
        return "not simulated"
    if of[0]["outcome"] == "absent":
        return f"absent: {of[0]['error']}"
    texts = []
    for method in dict.fromkeys((OURS + claim.policy, _METHOD)):
        same = [r for r in of if r["method"] == method and r["speed"] == _NOMINAL]
        budgets = ", ".join(f"{slower(r, of)} in {gib(r['budget_bytes'])}" for r in in_order(same))
        texts.append(f"`{method.removeprefix(OURS)}` {budgets} GiB")
    return "; ".join(texts)


def _from(claim: Claim, net: Net, of: list[Record]) -> str:
    """What the plan of the paper's policy needs and moves, from the simulation alone."""
    same = {
        r["budget"]: r
        for r in of
        if r["method"] == OURS + claim.policy and r["speed"] == _NOMINAL
        if r["outcome"] == "simulated"
    }
    if not same:
        return ""
    shown = next(same[b] for b in ("share", "paper", "machine", "smallest") if b in same)
    return f"{_memory(same['smallest'], shown)}; {_copies(claim, net, shown)}"


def _memory(least: Record, shown: Record) -> str:
    return (
        f"of {gib(least['peak_bytes'])} GiB at the peak {gib(least['persistent_bytes'])} hold "
        f"parameters, gradients and momentum, and {least['peak_op']} uses "
        f"{gib(least['peak_op_bytes'])}; {gib(shown['average_bytes'])} of "
        f"{gib(shown['baseline_average_bytes'])} on average"
    )


def _copies(claim: Claim, net: Net, shown: Record) -> str:
    kernels = f"{shown['oracle_seconds']:.2f} s of kernels at nominal rates"
    if net.seconds:
        kernels += f", for which the paper took {net.seconds:.2f}"
    out, back = moved(shown)
    if not out:
        return f"nothing moves beside {kernels}"
    there, here = _rates(claim)
    return (
        f"{gib(out)} GiB go and {gib(back)} come back, {out / there:.2f} and {back / here:.2f} s, "
        f"beside {kernels}"
    )


def _rates(claim: Claim) -> tuple[float, float]:
    """Bytes a second out and back by the policy that stands for the system."""
    machine = MACHINES[claim.machine]
    paging = machine.paging
    if paging is None or not traits_of(claim.policy).managed:
        return machine.link_bytes_per_s, machine.link_bytes_per_s
    faults = claim.policy == "ocdnn_naive"
    prefetch = paging.prefetch_bytes_per_s
    return prefetch, paging.fault_bytes_per_s if faults else prefetch


def _measured(net: Net, known: list[Record]) -> str:
    """What devices measured of the network at its batch, against plain in the same setting."""
    of: dict[tuple[Any, ...], list[Record]] = {}
    batches = set()
    for record in known:
        if record["workload"] != net.workload or record["outcome"] != "ok" or record.get("toy"):
            continue
        batch = _batch(record)
        if batch == net.batch:
            setting = [record.get(name) for name in ("precision", "channels_last")]
            about = (machine(record), *setting, _plain_name(record), str(record.get("budget")))
            of.setdefault(about, []).append(record)
        elif batch is not None and "median_seconds" in record:
            batches.add(batch)
    texts = []
    for (*setting, method, budget), same in of.items():
        plain = of.get((*setting, "plain", "none"))
        if method == _METHOD and plain is not None and "median_seconds" in same[0]:
            texts.append(_beside(same, plain, budget))
    at = ", ".join(map(str, sorted(batches)))
    absent = f"not at this batch, but at {at}" if batches else "not measured beside plain"
    return "; ".join(texts) or absent


def _beside(same: list[Record], plain: list[Record], budget: str) -> str:
    first = same[0]
    layout = ", channels_last" if first.get("channels_last") else ""
    count = flushes(same)
    flushed = f", flushes: {count}" if count else ""
    return (
        f"{first['device_name']}, {first.get('precision')}{layout}, budget {budget}: "
        f"{_seconds(same) / _seconds(plain) - 1:+.1%} time, peak "
        f"{gib(first['peak_allocated_bytes'])} of {gib(plain[0]['peak_allocated_bytes'])} "
        f"GiB{flushed}"
    )


def _batch(record: Record) -> int | None:
    """Samples of a batch; None where the network is not the workload's own otherwise."""
    from benchmarks.workloads import WORKLOADS

    own = WORKLOADS[record["workload"]].defaults()
    sizes = own | record.get("sizes", {})
    return int(sizes["batch"]) if sizes | {"batch": 0} == own | {"batch": 0} else None


def _plain_name(record: Record) -> str:
    """The method; records of before methods had a prefix call ours by the policy alone."""
    method = str(record["method"])
    return OURS + method if "planner" in record and ":" not in method else method


def _seconds(same: list[Record]) -> float:
    return median(record["median_seconds"] for record in same)
