"""Which modules to run in slices, and in how many, so that no single op is over the budget.

What a plan moves or recomputes is what autograd saves; what one op needs while it runs is the floor
under every plan. Cutting modules along the batch lowers it (tvDNN: Park et al., PPoPP 2018,
"memory-object sectioning"; the choice here is ours).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from belady.errors import PlanMismatchError
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan, Section
from belady.ir.residency import curve
from belady.ir.sections import apply
from belady.ir.trace import Op, Phase, Trace
from belady.planners.base import assemble
from belady.planners.floor import FLOOR
from belady.planners.moves import Case

# Modules that run one after another, and nothing beside them: the children of one Sequential.
Chain = Sequence[str]
# More slices make kernels too small to be of use; a longer stretch does more.
_SLICES = (2, 4, 8, 16, 32, 64)
_ROUNDS = 16
# What an op costs on each slice beside its bytes, as bytes: a start, and a last wave not full.
_A_SLICE = 8 << 20
# By how much fewer slices of a part of a stretch are than those of the whole, and how many that do
# not fit are tried before it is left at that.
_FEWER, _EASIER = (1, 2, 4, 8, 16), 40
# Work in slices, of that without, which is worth no search for less.
_LITTLE = 1.03
# What is tried first: short stretches, whose ends are resident as a whole, or long ones, where one
# number of slices has to do for all.
Order = Callable[[tuple[tuple[str, ...], int]], tuple[int, int]]
_ORDERS: tuple[Order, ...] = (
    lambda it: (len(it[0]), it[1]),
    lambda it: (-len(it[0]), it[1]),
)


def sections_for(
    trace: Trace,
    hardware: HardwareProfile,
    budget: Budget,
    chains: Sequence[Chain],
    may: Callable[[Section], bool],
) -> tuple[Section, ...] | None:
    """The least work in slices with which the floor of ``trace`` fits; None if none do.

    Parameters
    ----------
    trace
        Unsectioned, with module paths.
    chains
        What may be cut from.
    may
        Whether a section may run in slices; asked of few.

    Returns
    -------
    tuple of Section
        Empty if it fits as it is. Whoever runs them changes the order of sums.
    """
    search = _Search(trace, hardware, budget, chains, may)
    found = [it for order in _ORDERS for it in (search.found(order),) if it is not None]
    return min(map(search.refined, found), key=search.work, default=None)


def with_workspaces(trace: Trace, share: float) -> Trace:
    """The trace with what its convolutions may ask for beside their operands, where none is known.

    A library that does not get the workspace of its fastest algorithm takes another one, which can
    be tens of times slower, and stays with it.

    Parameters
    ----------
    share
        Bytes of workspace, of those of the largest operand or result.
    """

    def asks(op: Op) -> int:
        if op.workspace_bytes or "convolution" not in op.name:
            return op.workspace_bytes
        storages = {trace.values[value].storage for value in (*op.reads, *op.writes)}
        return int(share * max((trace.storages[it].nbytes for it in storages), default=0))

    return replace(trace, ops=tuple(replace(op, workspace_bytes=asks(op)) for op in trace.ops))


def over_budget(trace: Trace, hardware: HardwareProfile, budget: Budget) -> int:
    """Bytes of the floor of ``trace`` beyond the budget; negative where there is room."""
    return _Search(trace, hardware, budget, (), lambda _: False).excess(())[0]


class _Touched(NamedTuple):
    """An op in module ``path``: bytes read and made, and whether it is a norm over a batch."""

    path: str
    nbytes: int
    norm: bool


class _Search:
    def __init__(
        self,
        trace: Trace,
        hardware: HardwareProfile,
        budget: Budget,
        chains: Sequence[Chain],
        may: Callable[[Section], bool],
    ) -> None:
        self._trace = trace
        self._hardware = hardware
        self._budget = budget
        self._chains = chains
        self._may = may
        self._known: dict[tuple[Section, ...], tuple[int, str]] = {}
        self._allowed: dict[tuple[str, ...], bool] = {}
        self._out = _output_bytes(trace)
        self._touched = _touched_bytes(trace)

    def found(self, order: Order) -> tuple[Section, ...] | None:
        """Sections with which the floor fits, by the least change of the worst module each time."""
        chosen: tuple[Section, ...] = ()
        for _ in range(_ROUNDS):
            over, at = self.excess(chosen)
            if over <= 0:
                return chosen
            better = next(self._better(order, chosen, at, over), None)
            if better is None:
                return None
            chosen = better
        return None

    def refined(self, sections: tuple[Section, ...]) -> tuple[Section, ...]:
        """With less work, if they add much: fewer slices, or of parts of stretches, while all fits.

        Where they add little, more slices leave more room: they stay.
        """
        while (now := self.work(sections)) > _LITTLE * self.work(()):
            easier = ((self.work(it), it) for it in dict.fromkeys(self._easier(sections)))
            less = sorted((it for it in easier if it[0] < now), key=itemgetter(0))
            found = self._first_that_fits([it for _, it in less])
            if found is None:
                break
            sections = found
        return sections

    def _first_that_fits(
        self, candidates: Sequence[tuple[Section, ...]]
    ) -> tuple[Section, ...] | None:
        failed: list[dict[str, int]] = []
        for sections in candidates:
            slices = {name: it.slices for it in sections for name in it.modules}
            # Nowhere in more slices than what did not fit.
            if any(all(k <= it.get(name, 1) for name, k in slices.items()) for it in failed):
                continue
            if self.excess(sections)[0] > 0:
                failed.append(slices)
            elif all(map(self._is_allowed, sections)):
                return sections
            if len(failed) == _EASIER:
                break
        return None

    def _easier(self, sections: tuple[Section, ...]) -> Iterator[tuple[Section, ...]]:
        """Sections with one of them in fewer slices, or in two parts of which one is."""
        for section in sections:
            modules, most = section.modules, section.slices
            rest = [it for it in sections if it is not section]
            for at, fewer in product(range(len(modules)), _FEWER):
                for first, last in ((most, most // fewer), (most // fewer, most)):
                    parts = Section(modules[:at], first), Section(modules[at:], last)
                    some = (it for it in parts if it.modules and it.slices > 1)
                    yield tuple(sorted((*rest, *some), key=lambda it: it.modules))

    def work(self, sections: tuple[Section, ...]) -> int:
        """Bytes that ops touch, and what so many slices cost beside them."""
        total = 0
        for op in self._touched:
            within = (it.slices for it in sections if _inside(op.path, it.modules))
            slices = next(within, 1)
            # A norm over the batch reads again what it has summed up.
            total += op.nbytes * (2 if op.norm and slices > 1 else 1) + slices * _A_SLICE
        return total

    def excess(self, sections: tuple[Section, ...]) -> tuple[int, str]:
        """Bytes of the floor beyond the budget, and the module path of the op that needs most."""
        if sections not in self._known:
            self._known[sections] = self._judged(sections)
        return self._known[sections]

    def _better(
        self, order: Order, chosen: tuple[Section, ...], at: str, over: int
    ) -> Iterator[tuple[Section, ...]]:
        """Sections with which module ``at`` is no longer that much over, least change first."""
        for modules, slices in self._candidates(order, chosen, at):
            section = Section(modules, slices)
            rest = tuple(it for it in chosen if not _overlap(it.modules, modules))
            sections = tuple(sorted((*rest, section), key=lambda it: it.modules))
            left, where = self.excess(sections)
            helps = left <= 0 or (left < over and not _inside(where, modules))
            # The real module runs for an answer: asked last.
            if helps and self._is_allowed(section):
                yield sections

    def _candidates(
        self, order: Order, chosen: tuple[Section, ...], at: str
    ) -> Iterator[tuple[tuple[str, ...], int]]:
        """Stretches around ``at`` with the smallest bytes at their ends."""
        present = next((it for it in chosen if _inside(at, it.modules)), None)
        if present is not None:
            yield from ((present.modules, more) for more in _SLICES if more > present.slices)
        for chain in self._chains:
            middle = next((i for i, name in enumerate(chain) if _inside(at, (name,))), None)
            if middle is None:
                continue
            yield from sorted(product(self._stretches(chain, middle), _SLICES), key=order)

    def _stretches(self, chain: Chain, middle: int) -> Iterator[tuple[str, ...]]:
        """Runs of ``chain`` that begin and end where little goes in and out."""
        sizes = [self._out.get(name, 0) for name in chain]
        first = [i for i in range(middle + 1) if i == 0 or _lower(sizes, i - 1)]
        last = [j for j in range(middle, len(chain)) if _lower(sizes, j)]
        for i, j in product(first, last):
            yield tuple(chain[i : j + 1])

    def _is_allowed(self, section: Section) -> bool:
        """Whether it may be cut at all, asked once for all numbers of slices."""
        if section.modules not in self._allowed:
            self._allowed[section.modules] = self._may(section)
        return self._allowed[section.modules]

    def _judged(self, sections: tuple[Section, ...]) -> tuple[int, str]:
        try:
            trace = apply(self._trace, sections) if sections else self._trace
        except PlanMismatchError:
            return 1 << 62, ""
        held = curve(trace, _floor(trace, self._hardware, self._budget), self._hardware.allocator)
        peak = max(held, default=0)
        over = self._hardware.allocator.budget_for(peak) - self._budget.device_bytes
        return over, trace.ops[held.index(peak)].module if held else ""


def _floor(trace: Trace, hardware: HardwareProfile, budget: Budget) -> Plan:
    case = Case(trace, hardware, budget)
    return assemble(case, FLOOR.draft(case))


def _output_bytes(trace: Trace) -> dict[str, int]:
    """Bytes that the last forward op of each module, and of each module around it, writes."""
    found: dict[str, int] = {}
    for op in trace.ops:
        if op.phase is Phase.FORWARD and op.writes:
            nbytes = sum(trace.storages[trace.values[v].storage].nbytes for v in op.writes)
            path = op.module
            while path:
                found[path] = nbytes
                path = path.rpartition(".")[0]
    return found


def _touched_bytes(trace: Trace) -> list[_Touched]:
    """What each op that makes bytes reads and makes."""
    found = []
    for op in trace.ops:
        read, made = ({trace.values[v].storage for v in it} for it in (op.reads, op.writes))
        if made - read:
            nbytes = sum(trace.storages[it].nbytes for it in read | made)
            found.append(_Touched(op.module, nbytes, "batch_norm" in op.name))
    return found


def _lower(sizes: Sequence[int], index: int) -> bool:
    """Whether less comes out of a module than of the one before it, or it is the last."""
    return index == len(sizes) - 1 or index == 0 or sizes[index] < sizes[index - 1]


def _inside(path: str, modules: Sequence[str]) -> bool:
    return any(not name or path == name or path.startswith(f"{name}.") for name in modules)


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    return any(_inside(name, other) for name in one) or any(_inside(name, one) for name in other)
