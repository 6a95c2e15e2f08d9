"""Verb ``frontier``: memory against time, of ours, of every peer, and of what no plan can beat.

Ours at a ladder of budgets, in percent of plain's peak of allocated bytes; the bound at the same
ladder; each peer at its smallest passing cap; ours at the cap of each peer; at last ours at its own
smallest passing cap, which takes longest.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

from benchmarks.cases import BOUND, OURS, OWN, Case
from benchmarks.run import add_how, execute, how, sizes_of
from benchmarks.suites import PEER_NAMES

GROUP = "frontier"
LADDER = (120, 100, 80, 65, 50, 40, 30, 25, 20)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("out", type=Path, help="JSON lines; cases that it holds are skipped")
    parser.add_argument("--workload", default="resnet50", help="resnet50 unless given")
    parser.add_argument("--precision", default="bf16", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=NUMBER")
    parser.add_argument(
        "--policy",
        action="append",
        help="POLICY, or with its engine, as in belady-inductor:POLICY; auto unless given",
    )
    parser.add_argument("--peer", action="append", choices=PEER_NAMES, help="all unless given")
    parser.add_argument("--ladder", type=int, nargs="+", default=LADDER, metavar="PERCENT")
    parser.add_argument("--equal-steps", type=int, default=6, help="then results are compared")
    add_how(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure what the arguments name."""
    return execute(_set(cases(arguments), arguments), arguments, arguments.limit_s)


def _set(cases: Iterable[Case], arguments: argparse.Namespace) -> list[Case]:
    found = [
        replace(
            case,
            precision=arguments.precision,
            channels_last=arguments.channels_last,
            sizes=sizes_of(arguments),
            group=GROUP,
        )
        for case in cases
    ]
    return how(found, arguments)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """What is most telling first, as the time may be up at any case.

    Ours and the bound share a process: one run without a cap serves all budgets.
    """
    net, steps = arguments.workload, arguments.equal_steps
    yield Case(net, "plain", "none")
    given = arguments.policy or ("auto",)
    policies = [name if name.startswith(OWN) else OURS + name for name in given]
    for method in (BOUND, *policies):
        for percent in arguments.ladder:
            yield Case(net, method, f"{percent}%", shared=True)
    peers = arguments.peer or PEER_NAMES
    for method in peers:
        yield Case(net, method, "smallest", equal_steps=steps)
    for policy, method in product(policies, peers):
        yield Case(net, policy, f"100%:{method}", shared=True)
    for policy in policies:
        yield Case(net, policy, "smallest", equal_steps=steps)
