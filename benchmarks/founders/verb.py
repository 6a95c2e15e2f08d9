"""Verb ``founders``: the founders' figures beside belady's planners on the founders' machines.

Everything is simulated and needs no GPU: `benchmarks.founders.traces` says how seconds are made.
Each policy is asked for two plans: within what the machine has, and within the smallest budget that
the policy states.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import records
from benchmarks.cases import Record
from benchmarks.founders.claims import CLAIMS
from benchmarks.founders.table import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("out", type=Path, help="JSON lines; what it holds is not simulated again")
    parser.add_argument("--workload", action="append", help="only these")
    parser.add_argument("--limit-s", type=float, default=540.0)


def run(arguments: argparse.Namespace) -> int:
    """Simulate what is missing, then print the table."""
    deadline = time.monotonic() + arguments.limit_s
    done = {_key(record) for record in records.read(arguments.out)}
    for machine, net, batch in experiments():
        wanted = not arguments.workload or net in arguments.workload
        if not wanted or _key({"machine": machine, "workload": net, "batch": batch}) in done:
            continue
        from benchmarks.founders.simulated import simulated

        if time.monotonic() > deadline:
            print(f"out of time before {net} on {machine}")
            break
        for record in simulated(machine, net, batch):
            records.append(arguments.out, record)
    print(table([*records.committed(), *records.read(arguments.out)]))
    return 0


def experiments() -> Iterator[tuple[str, str, int]]:
    """Machine, network and batch of every claim that names them."""
    for claim in CLAIMS:
        for net, batch in claim.nets:
            yield claim.machine, net, batch


def _key(record: Record) -> str:
    return json.dumps([record.get(name) for name in ("machine", "workload", "batch")])
