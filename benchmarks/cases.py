"""A case: everything that defines one measurement. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

Record = dict[str, Any]

OURS = "belady:"
# What a method of ours begins with, and the engine that carries its policy out.
ENGINES = {OURS: "eager", "belady-graph:": "graph", "belady-inductor:": "inductor"}
OWN = tuple(ENGINES)
# What the name of a peer ends with that is launched as CUDA graphs.
LAUNCHED = "+graphs"
# Not a method: what no plan of belady's can beat, by `belady.simulate.bound`.
BOUND = "bound"
# Group of the records that no device measured.
SIMULATED = "founders-simulated"
# Between a share and the method whose smallest cap it is of.
_OF = "%:"
# Exit status of a process that lost its device: the cases left need a new one.
LOST = 75
# Outcome of a search that has found a cap, which is then measured in a process of its own: what
# libraries chose while caps failed (cuDNN, with what memory there was) would stay with it.
FOUND = "found"


@dataclass(frozen=True)
class Case:
    """One workload under one method.

    Attributes
    ----------
    method
        A peer's name, ``belady:POLICY``, ``belady-graph:POLICY``, ``belady-inductor:POLICY``, or
        ``bound``: what no plan can beat.
    budget
        ``none``; bytes such as ``4GiB``; ``50%`` of plain's peak of allocated bytes; ``own``, the
        smallest budget that a policy of ours states; ``smallest``, the smallest cap that the
        method passes; or ``50%:checkpoint``, of the smallest cap that another method passes.
    sizes
        What differs from the workload's own sizes, such as ``(("batch", 64),)``.
    equal_steps
        Steps after which losses and all gradients and parameters are compared with plain's, in a
        phase of its own; 0 leaves it out.
    round
        Number of the repetition; rounds are interleaved.
    shared
        Whether other cases of the workload run in the same process.
    group
        Name of the suite.
    """

    workload: str
    method: str
    budget: str = "none"
    precision: str = "tf32"
    channels_last: bool = False
    cudnn_benchmark: bool = True
    device: str = "cuda"
    toy: bool = False
    sizes: tuple[tuple[str, int], ...] = ()
    repeats: int = 10
    equal_steps: int = 0
    seed: int = 0
    round: int = 0
    shared: bool = False
    group: str = ""

    @property
    def key(self) -> str:
        """Name of the case; two cases with one key measure the same."""
        return json.dumps(self.as_json(), sort_keys=True)

    @property
    def together(self) -> str:
        """Cases with one such name, next to one another, may share a process.

        Not one that finds a cap and one that needs it, nor two engines: once anything is compiled
        the eager one recomputes nothing.
        """
        engine = next((it for prefix, it in ENGINES.items() if self.method.startswith(prefix)), "")
        compiled = engine if engine != ENGINES[OURS] else ""
        same = replace(self, method=compiled, budget=_OF if self.peer else "", equal_steps=0)
        return same.key

    @property
    def peer(self) -> str:
        """Method whose smallest cap the budget is a share of; empty if of none."""
        return self.budget.partition(_OF)[2]

    @property
    def share(self) -> float:
        """Part that a budget in percent is of what it is a share of."""
        return float(self.budget.partition("%")[0]) / 100

    def cap_of(self, method: str) -> str:
        """Name of the smallest cap that ``method`` passes in this case's setting."""
        return replace(self, method=method, budget="smallest").name

    @property
    def plain(self) -> str:
        """Name of what plain needs without a cap in this case's setting."""
        return replace(self, method="plain", budget="none").name

    @property
    def base(self) -> str:
        """Name of what the budget is a share of: of a peer's cap or plain's peak; empty if none."""
        return "" if self.finder is None else self.finder.name

    @property
    def finder(self) -> Case | None:
        """The case that finds what the budget is a share of; None if of nothing."""
        if "%" not in self.budget:
            return None
        method, budget = (self.peer, "smallest") if self.peer else ("plain", "none")
        return replace(self, method=method, budget=budget, equal_steps=0, round=0, shared=False)

    @property
    def name(self) -> str:
        """Of what a budget does to a method, however often and beside what it is measured."""
        return replace(self, repeats=0, equal_steps=0, round=0, shared=False, group="").key

    @property
    def reference(self) -> str:
        """Name of what plain must give for this case's losses and gradients to be equal."""
        return replace(
            self, method="plain", budget="none", repeats=0, round=0, shared=False, group=""
        ).key

    def as_json(self) -> Record:
        """What `from_json` reads."""
        return asdict(self) | {"sizes": dict(self.sizes)}


def from_json(given: Mapping[str, Any]) -> Case:
    """The case that `Case.as_json` wrote, perhaps among other entries."""
    names = {field.name for field in fields(Case)}
    known = {name: value for name, value in given.items() if name in names}
    return Case(**{**known, "sizes": tuple(sorted(known.get("sizes", {}).items()))})


def kernels_of(method: str) -> str:
    """Whose kernels a method runs: Inductor's, or those of eager mode, as captured graphs do."""
    inductor = method.removeprefix("belady-").startswith("inductor")
    return "inductor" if inductor else "eager"


def flushes(records: Iterable[Record]) -> int:
    """How often the allocator flushed its cache: with any, a method has not passed its cap."""
    return max((record.get("allocation_retries", 0) for record in records), default=0)


def key_of(record: Record) -> str | None:
    """Key of the case that a record is about; None for records of before there were keys."""
    return from_json(record).key if "equal_steps" in record else None


def label(case: Case) -> str:
    """The case in a few words."""
    sizes = "".join(f" {name}={value}" for name, value in case.sizes)
    layout = " channels_last" if case.channels_last else ""
    return f"{case.workload}{sizes} {case.precision}{layout} {case.method} {case.budget}"


def capped(record: Record) -> bool:
    """Whether it was to do with less than there is."""
    return record.get("budget") not in (None, "none")
