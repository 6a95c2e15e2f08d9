"""The ways in which one network's iteration can run on a founders' machine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from belady.ir.plan import Budget, Section
from belady.ir.sections import apply
from belady.ir.trace import Trace
from belady.ordered.wrap import ordered
from belady.planners import traits_of
from belady.planners.least import Least, least_of
from belady.planners.sectioning import Sectioning
from belady.planners.traits import Coordinated
from belady.sections.allowed import reasons
from belady.sections.candidate import chains
from benchmarks.founders.claim import Net
from benchmarks.founders.machines import MACHINES
from benchmarks.founders.traces import flops, observed_on, slowed, static
from benchmarks.workloads import WORKLOADS, Setting

PLAIN, ORDERED = "as it is", "in the coordinated order"


class Way(NamedTuple):
    """A trace, and how the modules run for it to be so."""

    how: str
    trace: Trace


class Iteration:
    """One network on one machine: as it is, in the coordinated order, in slices.

    What a policy may do is what its `Traits` say. Only ops are asked whether a section may be cut;
    the engine tries it on numbers as well. ``slower`` and ``heavier`` say how many times as long
    each op takes, and each byte that moves.
    """

    def __init__(self, machine: str, net: Net, slower: float = 1.0, heavier: float = 1.0) -> None:
        self.machine = MACHINES[machine].carrying(heavier)
        self.hardware = self.machine.profile()
        self._slower = slower
        setting = Setting("fp32", device="cpu")
        self._work = WORKLOADS[net.workload].make(setting, {"batch": net.batch}, False)
        self._cut: dict[Least, Way | None] = {}

    def ways(self, policy: str, nbytes: int | None) -> Iterator[Way]:
        """What ``policy`` may try one after another until it fits in ``nbytes``; None: uncut."""
        traits = traits_of(policy)
        if traits.coordinated is not Coordinated.ALWAYS:
            yield self.plain
        if traits.coordinated is not Coordinated.NEVER:
            yield self.ordered
        if traits.slices_modules and nbytes is not None:
            least = least_of(policy, self.hardware, Budget(nbytes))
            if least not in self._cut:
                self._cut[least] = self._in_slices(least)
            found = self._cut[least]
            if found is not None:
                yield found

    @cached_property
    def plain(self) -> Way:
        """As the network's layers run by themselves."""
        return Way(PLAIN, self._observed())

    @cached_property
    def ordered(self) -> Way:
        """With the gradients of parameters before those of inputs."""
        undo = ordered(self._work.model)
        try:
            return Way(ORDERED, self._observed())
        finally:
            undo()

    def _observed(self) -> Trace:
        trace = observed_on(self.machine, static(self._work), flops(self._work))
        return slowed(trace, self._slower)

    def _in_slices(self, least: Least) -> Way | None:
        model, trace = self._work.model, self.plain.trace

        def may(section: Section) -> bool:
            return not reasons(model, section, trace)

        found = Sectioning(trace, least, chains(model), may).within(least.budget.device_bytes)
        if not found:
            return None
        return Way("; ".join(map(_words, found)), apply(trace, found))


def _words(section: Section) -> str:
    ends = dict.fromkeys((section.modules[0], section.modules[-1]))
    return f"{' to '.join(ends)} in {section.slices} slices"
