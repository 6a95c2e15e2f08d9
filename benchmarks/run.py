"""Verb ``run``: cases in processes of their own, one JSON line each, as soon as it is there."""

from __future__ import annotations

import argparse
import itertools
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from belady.units import format_bytes, format_seconds
from benchmarks import options, records
from benchmarks.cases import Case, Record, label
from benchmarks.processes import grouped, here, measure
from benchmarks.suites import SUITES

# Titles, entries of a record, and how they are written.
_SHOWN: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("", "median_seconds", format_seconds),
    ("in a row", "pipelined_seconds", format_seconds),
    ("predicted", "predicted_seconds", format_seconds),
    ("bound", "bound_seconds", format_seconds),
    ("kernels", "kernel_seconds", format_seconds),
    ("host", "host_seconds", format_seconds),
    ("stall", "stall_seconds", format_seconds),
    ("stall predicted", "predicted_stall_seconds", format_seconds),
    ("peak", "peak_allocated_bytes", format_bytes),
    ("peak predicted", "predicted_peak_bytes", format_bytes),
    ("reserved", "peak_reserved_bytes", format_bytes),
    ("budget", "budget_bytes", format_bytes),
    ("retries", "allocation_retries", str),
    ("by", "planner", str),
    ("values moved", "moved_values", str),
    ("warm-up", "warm_up", str),
    ("equal", "equal", str),
    ("all of it", "wall_seconds", format_seconds),
)


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
    parser.add_argument("--limit-s", type=float, default=540.0, help="of everything")
    parser.add_argument("--case-limit-s", type=float, default=300.0, help="then it is a crash")


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


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def after_caps(cases: Sequence[Case], caps: Container[str]) -> list[Case]:
    """The cases, each after the one that finds the cap that its budget is a share of.

    ``caps`` names those that are known.
    """
    listed = {it.cap_of(it.method): it for it in reversed(cases) if it.budget == "smallest"}
    found: dict[Case, None] = {}
    for case in cases:
        name = case.cap_of(case.peer)
        if case.peer and name not in caps:
            alone = replace(case, method=case.peer, budget="smallest", equal_steps=0, round=0)
            found[listed.get(name, replace(alone, shared=False))] = None
        found[case] = None
    return list(found)


def execute(cases: Sequence[Case], arguments: argparse.Namespace, limit_s: float) -> int:
    """Measure what is not in the file yet, until the time is up. Gives an exit status."""
    out: Path = arguments.out
    deadline = time.monotonic() + limit_s
    if any(case.device.startswith("cuda") for case in cases) and not _has_cuda():
        print("there is no CUDA device here: --toy runs small networks on a CPU")
        return 2
    machines = {device: here(device) for device in sorted({case.device for case in cases})}
    # They can be long, and do not change.
    others = [record for path in arguments.known for record in records.read(path)]
    todo = _left(cases, [*others, *records.read(out)], machines)
    for group in grouped(todo):
        remaining = group
        while remaining:
            known = _of(machines, [*others, *records.read(out)])
            remaining, caps = _capped(remaining, records.caps(known))
            if not remaining:
                break
            left = deadline - time.monotonic()
            if left < _expected(remaining[0], known):
                print(f"out of time before {label(remaining[0])}")
                return 0
            allowed = min(left, arguments.case_limit_s * len(remaining))
            told = {"references": records.references(known), "caps": caps}
            remaining, ended = measure(remaining, told, allowed, lambda record: _keep(record, out))
            if ended is not None and time.monotonic() < deadline:
                failed = remaining.pop(0)
                about = failed.as_json() | machines[failed.device]
                _keep(about | {"outcome": "crash", "error": ended}, out)
    return 0


def _left(
    cases: Sequence[Case], held: Sequence[Record], machines: Mapping[str, Record]
) -> list[Case]:
    """The cases that no record is about on this machine, after those that find their caps.

    What crashed is not tried again unless its line is deleted.
    """
    known = _of(machines, held)
    cases = after_caps(cases, records.caps(known))
    done = {records.key_of(record) for record in known}
    todo = [case for case in cases if case.key not in done]
    if len(todo) < len(cases):
        print(f"{len(cases) - len(todo)} of {len(cases)} cases are on record")
    again = {case.key for case in todo} & {records.key_of(record) for record in held}
    if again:
        print(f"{len(again)} of {len(cases)} are on record, but not of this device and torch")
    return todo


def _of(machines: Mapping[str, Record], held: Iterable[Record]) -> list[Record]:
    """The records that this machine measured."""
    these = {(device, *records.machine(about)) for device, about in machines.items()}
    return [it for it in held if (it.get("device"), *records.machine(it)) in these]


def _capped(
    cases: Sequence[Case], caps: Mapping[str, int | None]
) -> tuple[list[Case], dict[str, int]]:
    """The cases but for those whose budget is a share of a cap that there is not, and the caps."""
    passed = {name: cap for name, cap in caps.items() if cap is not None}
    ready = []
    for case in cases:
        if case.peer and case.cap_of(case.peer) not in passed:
            print(f"left out, as {case.peer} passed no cap: {label(case)}")
        else:
            ready.append(case)
    return ready, passed


def _expected(case: Case, known: Iterable[Record]) -> float:
    """Seconds that the case took before, or else the longest of its workload, or of any."""
    longest: dict[tuple[str, ...], float] = {}
    for record in known:
        seconds = record.get("wall_seconds", 0.0)
        for name in _names(record["workload"], record["method"], record.get("budget", "")):
            longest[name] = max(longest.get(name, 0.0), seconds)
    names = _names(case.workload, case.method, case.budget)
    return next((longest[name] for name in names if name in longest), 0.0)


def _names(workload: str, method: str, budget: str) -> tuple[tuple[str, ...], ...]:
    return (workload, method, budget), (workload,), ()


def _keep(record: Record, out: Path) -> None:
    records.append(out, record)
    print(line(record), flush=True)


def line(record: Record) -> str:
    """A record in one line, for whoever looks on: what is known of it."""
    words = [str(record.get(k)) for k in ("workload", "method", "budget", "precision", "outcome")]
    facts = [
        f"{title} {form(record[name])}".strip()
        for title, name, form in _SHOWN
        if record.get(name) is not None
    ]
    error = str(record.get("error", "")).strip().rpartition("\n")[2]
    return f"{' '.join(words)}: {', '.join([*facts, *([error] if error else [])])}"
