"""What options of several verbs may be: checked before anything is measured."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError, Namespace
from collections.abc import Collection
from pathlib import Path

from belady.planners import POLICIES
from belady.units import parse_bytes
from benchmarks.cases import BOUND, OURS, OWN, Case
from benchmarks.errors import GivenError
from benchmarks.suites import PEER_NAMES

_BUDGETS = "none, 4GiB, 50%, own, smallest or 50%:PEER"


def count(text: str) -> int:
    """How many, at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no number from 1 on")
    return int(text)


def workload(name: str) -> str:
    """A workload that there is."""
    from benchmarks.workloads import WORKLOADS

    if name not in WORKLOADS:
        raise ArgumentTypeError(f"there is no workload {name!r}: one of {', '.join(WORKLOADS)}")
    return name


def method(name: str) -> str:
    """A peer, the bound, or one of our policies after its engine."""
    engine, colon, policy = name.partition(":")
    if engine + colon in OWN and policy in POLICIES:
        return name
    if engine + colon in OWN:
        raise ArgumentTypeError(f"there is no policy {policy!r}: one of {', '.join(POLICIES)}")
    if name not in (*PEER_NAMES, BOUND):
        raise ArgumentTypeError(
            f"there is no method {name!r}: POLICY after one of {', '.join(OWN)} or one of "
            f"{', '.join((*PEER_NAMES, BOUND))}"
        )
    return name


def ours(name: str) -> str:
    """A policy, after its engine or alone; gives the method."""
    return method(name if name.startswith(OWN) else OURS + name)


def budget(text: str) -> str:
    """A budget as `Case.budget` has it."""
    share, colon, peer = text.partition(":")
    if colon and (method(peer) == BOUND or not share.endswith("%")):
        raise ArgumentTypeError(f"{text!r} is none of {_BUDGETS}")
    try:
        if share.endswith("%"):
            given = float(share[:-1]) > 0 and math.isfinite(float(share[:-1]))
        else:
            given = share in ("none", "own", "smallest") or parse_bytes(share) > 0
    except ValueError:
        given = False
    if not given:
        raise ArgumentTypeError(f"{text!r} is none of {_BUDGETS}")
    return text


def size(text: str) -> tuple[str, int]:
    """One ``NAME=NUMBER``."""
    name, _, number = text.partition("=")
    if not name or not number.isdecimal() or int(number) < 1:
        raise ArgumentTypeError(f"{text!r} is no NAME=NUMBER, such as batch=64")
    return name, int(number)


def sizes_of(arguments: Namespace) -> tuple[tuple[str, int], ...]:
    """What ``--size`` says, the last of a name."""
    return tuple(sorted(dict(arguments.size).items()))


def check(cases: Collection[Case], arguments: Namespace) -> None:
    """Refuse options each of which could be, but not together."""
    if not cases:
        raise GivenError("no suite that was named has such a case")
    if arguments.size and (arguments.toy or any(case.toy for case in cases)):
        raise GivenError("--size: networks at toy size have one size")
    for case in cases:
        _check_sizes(case)
        if case.budget == "own" and not case.method.startswith(OWN):
            raise GivenError(f"{case.method} states no budget of its own")
        if case.budget == "smallest" and case.method == BOUND:
            raise GivenError(f"{BOUND} passes no cap: it is worked out, not run")


def _check_sizes(case: Case) -> None:
    from benchmarks.workloads import WORKLOADS

    known = WORKLOADS[case.workload].defaults()
    unknown = [name for name, _ in case.sizes if name not in known]
    if unknown:
        raise GivenError(f"{case.workload} has no size {unknown[0]!r}: one of {', '.join(known)}")


def existing(text: str) -> Path:
    """A file of records that is there."""
    path = Path(text)
    if not path.is_file():
        raise ArgumentTypeError(f"there is no file {path}")
    return path


def writable(text: str) -> Path:
    """A file that can be written, which is tried; it is left as it was."""
    path = Path(text)
    new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ArgumentTypeError(f"{path} cannot be written: {error.strerror}") from error
    if new:
        path.unlink()
    return path


def figure(text: str) -> Path:
    """A figure that can be written."""
    if Path(text).suffix.lower() not in (".svg", ".png"):
        raise ArgumentTypeError(f"{text}: a figure ends in .svg or .png")
    return writable(text)
