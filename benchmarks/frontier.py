"""Verb ``frontier``: memory against time, of ours, of every peer, and of what no plan can beat.

One workload against every peer; ``run --suite frontier`` is fourteen workloads against a few.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from benchmarks import options
from benchmarks.cases import OURS, Case
from benchmarks.run import add_how, how
from benchmarks.suites import FRONTIER, PEER_NAMES, frontier_of
from benchmarks.sweep import execute

LADDER = (120, 100, 80, 65, 50, 40, 30, 25, 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "out", type=options.writable, help="JSON lines; cases that it holds of here are skipped"
    )
    parser.add_argument(
        "--workload", type=options.workload, default="resnet50", help="resnet50 unless given"
    )
    parser.add_argument("--precision", default="bf16", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument(
        "--size", action="append", type=options.size, default=[], metavar="NAME=NUMBER"
    )
    parser.add_argument(
        "--policy",
        action="append",
        type=options.ours,
        help="POLICY, or with its engine, as in belady-inductor:POLICY; auto unless given",
    )
    parser.add_argument("--peer", action="append", choices=PEER_NAMES, help="all unless given")
    parser.add_argument(
        "--ladder", type=options.count, nargs="+", default=LADDER, metavar="PERCENT"
    )
    parser.add_argument("--equal-steps", type=int, default=6, help="then results are compared")
    add_how(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure what the arguments name."""
    return execute(cases(arguments), arguments, arguments.limit_s)


def cases(arguments: argparse.Namespace) -> list[Case]:
    """What the arguments name."""
    found = frontier_of(
        arguments.workload,
        arguments.peer or PEER_NAMES,
        arguments.policy or [OURS + "auto"],
        arguments.ladder,
        arguments.equal_steps,
    )
    of = {
        "precision": arguments.precision,
        "channels_last": arguments.channels_last,
        "sizes": options.sizes_of(arguments),
        "group": FRONTIER,
    }
    return how((replace(case, **of) for case in found), arguments)
