"""Measures cases, one after another or several at once, until all are on record."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks import records
from benchmarks.cases import FOUND, Case, Record, label
from benchmarks.errors import GivenError
from benchmarks.processes import grouped, here, measure
from benchmarks.saying import line

Group = list[Case]


def execute(cases: Sequence[Case], arguments: argparse.Namespace, limit_s: float) -> int:
    """Measure what is not in the file yet, until the time is up. Gives an exit status."""
    deadline = time.monotonic() + limit_s
    cuda = any(case.device.startswith("cuda") for case in cases)
    if cuda and not _has_cuda():
        print("there is no CUDA device here: --toy runs small networks on a CPU")
        return 2
    gpus = _gpus(arguments.at_once) if cuda else [None] * arguments.at_once
    machines = {device: here(device) for device in sorted({case.device for case in cases})}
    # They can be long, and do not change.
    others = [record for path in arguments.known for record in records.read(path)]
    todo = _left(cases, [*others, *records.read(arguments.out)], machines)
    sweep = Sweep(arguments.out, others, machines, deadline, arguments.case_limit_s)
    sweep.run(list(grouped(todo)), gpus)
    return 0


class Sweep:
    """Groups of cases, each measured in a process.

    Parameters
    ----------
    out
        Where records go, as soon as they are there.
    others
        Records of before.
    machines
        What records of this machine say of it, by device.
    deadline
        By `time.monotonic`.
    case_limit_s
        For each case of a group.
    """

    def __init__(
        self,
        out: Path,
        others: Sequence[Record],
        machines: Mapping[str, Record],
        deadline: float,
        case_limit_s: float,
    ) -> None:
        self._out, self._others, self._machines = out, others, machines
        self._deadline, self._case_limit_s = deadline, case_limit_s
        self._at_once = 1
        self._found: dict[str, int | None] = {}  # caps that are to be measured
        self._pending: list[Group] = []
        self._running: list[Group] = []
        self._errors: list[BaseException] = []
        # Held where groups are taken, and where the file is read or written.
        self._changed = threading.Condition()

    def run(self, groups: Sequence[Group], gpus: Sequence[str | None]) -> None:
        """Measure all groups, as many at once as there are ``gpus``, which may be the same."""
        self._pending, self._at_once = list(groups), len(gpus)
        if len(gpus) == 1:
            # By itself it has all GPUs, as whoever started it.
            self._lane(None)
            return
        lanes = [threading.Thread(target=self._guarded, args=(it,), daemon=True) for it in gpus]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        finally:
            # After Ctrl-C no lane is to begin another group; processes end with this one.
            self._stop()
        if self._errors:
            raise self._errors[0]

    def _guarded(self, gpu: str | None) -> None:
        try:
            self._lane(gpu)
        except BaseException as error:
            self._errors.append(error)
            self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._pending.clear()
            self._changed.notify_all()

    def _lane(self, gpu: str | None) -> None:
        while (group := self._taken()) is not None:
            try:
                self._measure(group, gpu)
            finally:
                with self._changed:
                    self._running.remove(group)
                    self._changed.notify_all()

    def _taken(self) -> Group | None:
        """The next group whose budgets nobody is about to find; None if there is none left."""
        with self._changed:
            while self._pending:
                ready = next(filter(self._is_ready, self._pending), None)
                if ready is not None:
                    self._pending.remove(ready)
                    self._running.append(ready)
                    return ready
                self._changed.wait()
        return None

    def _is_ready(self, group: Group) -> bool:
        # Who finds a base comes before who needs it, see `after_bases`, and so is at it or done.
        finders = {case.name for it in self._running for case in it}
        return finders.isdisjoint(case.base for case in group)

    def _measure(self, group: Group, gpu: str | None) -> None:
        remaining = group
        while remaining:
            with self._changed:
                known = self._known()
            remaining, bases = _based(remaining, records.bases(known) | self._found)
            if not remaining:
                return
            left = self._deadline - time.monotonic()
            if left < _expected(remaining[0], known):
                print(f"too little time is left for {label(remaining[0])}")
                remaining = remaining[1:]
                continue
            allowed = min(left, self._case_limit_s * len(remaining))
            told = {"references": records.references(known), "bases": bases}
            remaining, ended = measure(remaining, told, allowed, self._keep, gpu)
            if ended is not None and time.monotonic() < self._deadline:
                failed = remaining.pop(0)
                about = failed.as_json() | self._machines[failed.device]
                self._keep(about | {"outcome": "crash", "error": ended})

    def _known(self) -> list[Record]:
        """What is on record of this machine."""
        return _of(self._machines, [*self._others, *records.read(self._out)])

    def _keep(self, record: Record) -> None:
        if self._at_once > 1:
            record = record | {"at_once": self._at_once}
        with self._changed:
            if record["outcome"] == FOUND:
                # Even if it is of another GPU than the first: it is not to be searched for again.
                self._found |= records.bases([record])
            record = records.with_search(record, self._known())
            records.append(self._out, record)
            print(line(record), flush=True)


def after_bases(cases: Sequence[Case], bases: Container[str]) -> list[Case]:
    """The cases, each after the one that finds what its budget is a share of.

    ``bases`` names what is known.
    """
    listed = {it.name: it for it in reversed(cases)}
    found: dict[Case, None] = {}
    for case in cases:
        if case.finder is not None and case.base not in bases:
            found[listed.get(case.base, case.finder)] = None
        found[case] = None
    return list(found)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _gpus(count: int) -> list[str | None]:
    """Names of so many GPUs, as ``CUDA_VISIBLE_DEVICES`` has them."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else [str(it) for it in range(torch.cuda.device_count())]
    if len(names) < count:
        raise GivenError(f"--at-once {count}: at most {len(names)}, as each needs a GPU of its own")
    return list(names[:count])


def _left(
    cases: Sequence[Case], held: Sequence[Record], machines: Mapping[str, Record]
) -> list[Case]:
    """The cases that no record is about on this machine, after those that find their bases.

    What crashed is not tried again unless its line is deleted.
    """
    held = [record for record in held if record.get("outcome") != FOUND]
    known = _of(machines, held)
    cases = after_bases(cases, records.bases(known))
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


def _based(
    cases: Sequence[Case], bases: Mapping[str, int | None]
) -> tuple[list[Case], dict[str, int]]:
    """The cases but for those whose budget is a share of what there is not, and what there is.

    Of several that share a process the largest budget comes first: what cuDNN takes where memory is
    scarce it would take again where there is more.
    """
    known = {name: nbytes for name, nbytes in bases.items() if nbytes is not None}
    finders = {case.name for case in cases}
    ready = []
    for case in cases:
        if case.base and case.base not in known and case.base not in finders:
            what = f"cap of {case.peer}" if case.peer else "peak of plain"
            print(f"left out, as there is no {what}: {label(case)}")
        else:
            ready.append(case)
    ready.sort(key=lambda it: -it.share * known[it.base] if it.peer else 0)
    return ready, known


def _expected(case: Case, known: Iterable[Record]) -> float:
    """Seconds that the case took before, at most; else the median of its workload's, or of all.

    That, too, where a cap was searched for and is found.
    """
    found: dict[tuple[str, ...], list[float]] = {}
    searched = False
    for record in known:
        if record.get("outcome") == FOUND:
            searched |= records.key_of(record) == case.key
            continue
        seconds = record.get("wall_seconds", 0.0)
        for name in _names(record["workload"], record["method"], record.get("budget", "")):
            found.setdefault(name, []).append(seconds)
    exact, *others = _names(case.workload, case.method, case.budget)
    if exact in found and not searched:
        return max(found[exact])
    return next((median(found[name]) for name in others if name in found), 0.0)


def _names(workload: str, method: str, budget: str) -> tuple[tuple[str, ...], ...]:
    return (workload, method, budget), (workload,), ()
