"""Where in a model sections can be: stretches of modules, and the same in other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product

from belady.ir.plan import Section
from belady.ir.trace import Phase, Trace
from belady.planners.slicework import inside

# Modules that run one after another, and nothing beside them: the children of one Sequential.
Chain = tuple[str, ...]
Sections = tuple[Section, ...]
# What is tried first: short stretches, whose ends are resident as a whole, or long ones, where one
# number of slices has to do for all.
Order = Callable[[Chain], int]
# By how much fewer slices of a part of a stretch are than those of the whole.
_FEWER = (1, 2, 4, 8, 16)


class Places:
    """The modules of a trace.

    Parameters
    ----------
    chains
        What may be cut from.
    """

    def __init__(self, trace: Trace, chains: Sequence[Chain]) -> None:
        self._chains = chains
        # Of the forward ops of each module, and of each module around it: names, and bytes written.
        self._ops: dict[str, list[tuple[str, int]]] = {}
        for op in trace.ops:
            if op.phase is Phase.FORWARD and op.writes:
                nbytes = sum(trace.storages[trace.values[v].storage].nbytes for v in op.writes)
                path = op.module
                while path:
                    self._ops.setdefault(path, []).append((op.name, nbytes))
                    path = path.rpartition(".")[0]

    def around(self, at: str, order: Order) -> Iterator[list[Chain]]:
        """Stretches around module ``at`` with little at their ends; equal ones together."""
        for chain in self._chains:
            middle = next((i for i, name in enumerate(chain) if inside(at, (name,))), None)
            if middle is not None:
                stretches = sorted(self._stretches(chain, middle), key=order)
                yield from (list(equal) for _, equal in groupby(stretches, key=order))

    def _stretches(self, chain: Chain, middle: int) -> Iterator[Chain]:
        """Runs of ``chain`` that begin and end where little goes in and out."""
        sizes = [self._ops[name][-1][1] if name in self._ops else 0 for name in chain]
        first = [i for i in range(middle + 1) if i == 0 or _lower(sizes, i - 1)]
        last = [j for j in range(middle, len(chain)) if _lower(sizes, j)]
        for i, j in product(first, last):
            yield chain[i : j + 1]

    def alike(self, section: Section) -> list[Section]:
        """The same modules in layers that do the same, the nearest first.

        These are of the same paths, but for one number of a module around them.
        """
        first = section.modules[0].split(".")
        around = len(first) - (len(section.modules) > 1)
        found: dict[Chain, int] = {}
        for at in (it for it in range(around) if first[it].isdigit()):
            for number in self._numbers(".".join(first[:at])):
                modules = tuple(_renumbered(name, at, number) for name in section.modules)
                if modules != section.modules and self._do_the_same(modules, section.modules):
                    found.setdefault(modules, abs(int(number) - int(first[at])))
        return [replace(section, modules=it) for it in sorted(found, key=found.__getitem__)]

    def _numbers(self, around: str) -> Iterator[str]:
        """Numbers among the names of the children of a module."""
        for path in self._ops:
            parent, _, name = path.rpartition(".")
            if parent == around and name.isdigit():
                yield name

    def _do_the_same(self, one: Chain, other: Chain) -> bool:
        return all(self._ops.get(a) == self._ops.get(b) for a, b in zip(one, other, strict=True))


def with_sections(chosen: Sections, new: Iterable[Section]) -> Sections:
    """The sections with others, in place of those that these are about."""
    new = tuple(new)
    rest = (it for it in chosen if not any(overlap(it, other) for other in new))
    return tuple(sorted((*rest, *new), key=lambda it: it.modules))


def easier(sections: Sections) -> Iterator[Sections]:
    """Sections with one of them in fewer slices, or in two parts of which one is."""
    for section in sections:
        modules, most = section.modules, section.slices
        rest = [it for it in sections if it is not section]
        for at, fewer in product(range(len(modules)), _FEWER):
            for first, last in ((most, most // fewer), (most // fewer, most)):
                parts = (
                    replace(section, modules=modules[:at], slices=first),
                    replace(section, modules=modules[at:], slices=last),
                )
                some = (it for it in parts if it.modules and it.slices > 1)
                yield tuple(sorted((*rest, *some), key=lambda it: it.modules))


def may_replace(section: Section, chosen: Sections) -> Iterator[bool]:
    """Of each that is ``chosen``: whether it is apart, or the same in fewer slices."""
    for other in chosen:
        finer = other.modules == section.modules and other.slices < section.slices
        yield finer or not overlap(section, other)


def overlap(one: Section, other: Section) -> bool:
    """Whether sections have modules in common."""
    return any(inside(name, other.modules) for name in one.modules) or any(
        inside(name, one.modules) for name in other.modules
    )


def _renumbered(path: str, at: int, number: str) -> str:
    parts = path.split(".")
    return ".".join((*parts[:at], number, *parts[at + 1 :]))


def _lower(sizes: Sequence[int], index: int) -> bool:
    """Whether less comes out of a module than of the one before it, or it is the last."""
    return index == len(sizes) - 1 or index == 0 or sizes[index] < sizes[index - 1]
