"""Verb ``founders``: the founders' figures beside belady's planners on the founders' machines.

Everything is simulated and needs no GPU: `benchmarks.founders.traces` says how seconds are made.
Each policy is asked for plans within what the machine has, within what the paper ran the network in
where that is less (or our trace's share of memory that corresponds to it), and within the smallest
budget that the policy states. What the file holds is
not simulated again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

from benchmarks import options, records
from benchmarks.cases import Record
from benchmarks.founders.claim import Net
from benchmarks.founders.claims import CLAIMS
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.table import table

_NAMES = ("machine", "workload", "batch", "speed", "method", "budget")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "out", type=options.writable, help="JSON lines; what it holds is not simulated again"
    )
    networks = sorted({net.workload for _, net in experiments()})
    parser.add_argument("--workload", action="append", choices=networks, help="only these")
    parser.add_argument("--machine", action="append", choices=sorted(MACHINES), help="only these")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of everything")
    parser.add_argument("--ilp-limit-s", type=float, default=60.0, help="of each integer program")


def run(arguments: argparse.Namespace) -> int:
    """Simulate what is missing, then print the table."""
    from benchmarks.founders.simulated import simulated, wanted

    deadline = time.monotonic() + arguments.limit_s
    done = {_key(record) for record in records.read(arguments.out)}
    for machine, net in _chosen(arguments):
        plans = [name for name in wanted(machine, net) if _key(name) not in done]
        if not plans:
            continue
        print(f"{net.workload}, batch {net.batch}, {machine}: {len(plans)} plans", flush=True)
        for record in simulated(machine, net, plans, arguments.ilp_limit_s):
            records.append(arguments.out, record)
            print("  " + _line(record), flush=True)
            if time.monotonic() > deadline:
                print("out of time: the same command goes on from here")
                return 0
    print(table(records.read(arguments.out)))
    return 0


def experiments() -> Iterator[tuple[str, Net]]:
    """Machine and network of every claim that names them, each once."""
    found = {
        (claim.machine, net.workload, net.batch): (claim.machine, net)
        for claim in CLAIMS
        for net in claim.nets
    }
    return iter(found.values())


def _chosen(arguments: argparse.Namespace) -> Iterator[tuple[str, Net]]:
    for machine, net in experiments():
        of_machine = machine in (arguments.machine or [machine])
        if of_machine and net.workload in (arguments.workload or [net.workload]):
            yield machine, net


def _key(record: Record) -> tuple[object, ...]:
    return tuple(record.get(name) for name in _NAMES)


def _line(record: Record) -> str:
    """A record in one line, for whoever looks on."""
    words = " ".join(str(record[name]) for name in ("speed", "method", "budget"))
    if record["outcome"] == "absent":
        return f"{words}: absent, {record['error']}"
    gib = f"{record['budget_bytes'] / 2**30:.2f} GiB"
    if record["outcome"] != "simulated":
        return f"{words}, {gib}: needs {record['smallest_bytes'] / 2**30:.2f} GiB"
    slower = record["simulated_seconds"] / record["oracle_seconds"] - 1
    return f"{words}, {gib}: {slower:+.1%} time, {record['way']}"
