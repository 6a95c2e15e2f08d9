"""Verb ``run``: cases in processes of their own, one JSON line each, as soon as it is there."""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks import options
from benchmarks.cases import Case
from benchmarks.suites import SUITES
from benchmarks.sweep import execute


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument(
        "out", type=options.writable, help="JSON lines; cases that it holds of here are skipped"
    )
    parser.add_argument(
        "--suite", action="append", choices=sorted(SUITES), default=[],
        help="cases with a name, see benchmarks/README.md; else those that the options name",
    )  # fmt: skip
    parser.add_argument(
        "--workload", action="append", type=options.workload, help="or, with a suite, only these"
    )
    parser.add_argument(
        "--method", action="append", type=options.method, help="a peer, or belady:POLICY"
    )
    parser.add_argument(
        "--budget", action="append", type=options.budget,
        help="none, 4GiB, 50%%, own, smallest or 50%%:PEER",
    )  # fmt: skip
    parser.add_argument("--precision", action="append", choices=("fp32", "tf32", "bf16"))
    parser.add_argument(
        "--size", action="append", type=options.size, default=[], metavar="NAME=NUMBER",
        help="batch=64, say",
    )  # fmt: skip
    parser.add_argument("--channels-last", action="store_true", help="of images and weights")
    parser.add_argument(
        "--no-cudnn-benchmark", action="store_true", help="cuDNN does not time its algorithms"
    )
    parser.add_argument("--equal-steps", type=int, help="steps before results are compared")
    add_how(parser)


def add_how(parser: argparse.ArgumentParser) -> None:
    """Options that say how, not what."""
    parser.add_argument("--device", choices=("cuda", "cpu"), help="cuda unless --toy")
    parser.add_argument("--toy", action="store_true", help="networks small enough for a CPU")
    parser.add_argument(
        "--repeats", type=options.count, default=10, help="iterations that are timed"
    )
    parser.add_argument("--rounds", type=options.count, default=2, help="of all cases, interleaved")
    parser.add_argument(
        "--share-process", action="store_true", help="of neighbours of one workload"
    )
    parser.add_argument(
        "--known", action="extend", nargs="+", type=options.existing, default=[], metavar="FILE",
        help="records of other runs: what they hold of this device and torch is not measured again",
    )  # fmt: skip
    parser.add_argument(
        "--at-once", type=options.count, default=1, metavar="N", help="each on a GPU of its own"
    )
    parser.add_argument("--limit-s", type=float, default=540.0, help="of everything")
    parser.add_argument("--case-limit-s", type=float, default=900.0, help="then it is a crash")


def run(arguments: argparse.Namespace) -> int:
    """Run the cases that the arguments name."""
    return execute(how(chosen(arguments), arguments), arguments, arguments.limit_s)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases of the suites, narrowed by the other options; or those that the options name."""
    if arguments.suite:
        found = [
            replace(case, group=suite) for suite in arguments.suite for case in SUITES[suite]()
        ]
        for name in ("workload", "method", "budget", "precision"):
            wanted = getattr(arguments, name)
            found = [case for case in found if not wanted or getattr(case, name) in wanted]
    else:
        axes = (
            arguments.workload or ["resnet50"],
            arguments.precision or ["tf32"],
            arguments.method or ["plain"],
            arguments.budget or ["none"],
        )
        found = [
            Case(workload, method, budget, precision)
            for workload, precision, method, budget in itertools.product(*axes)
        ]
    changes: dict[str, Any] = {}
    if arguments.size:
        changes["sizes"] = options.sizes_of(arguments)
    if arguments.channels_last:
        changes["channels_last"] = True
    if arguments.no_cudnn_benchmark:
        changes["cudnn_benchmark"] = False
    if arguments.equal_steps is not None:
        changes["equal_steps"] = arguments.equal_steps
    return [replace(case, **changes) for case in found]


def how(cases: Iterable[Case], arguments: argparse.Namespace) -> list[Case]:
    """The cases in rounds, with what the options say of device and repeats."""
    cases = list(cases)
    options.check(cases, arguments)
    changes: dict[str, Any] = {"repeats": arguments.repeats}
    if arguments.toy:
        changes |= {"toy": True, "device": "cpu", "sizes": ()}
    if arguments.device:
        changes["device"] = arguments.device
    if arguments.share_process:
        changes["shared"] = True
    return in_rounds([replace(case, **changes) for case in cases], arguments.rounds)


def in_rounds(cases: Sequence[Case], rounds: int) -> list[Case]:
    """All cases, then all again: what is listed twice or run in rounds is told apart."""
    seen: Counter[Case] = Counter()
    found = []
    for case in [case for _ in range(rounds) for case in cases]:
        found.append(replace(case, round=seen[case]))
        seen[case] += 1
    return found
