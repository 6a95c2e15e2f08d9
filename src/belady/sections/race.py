"""Which of several choices of slices runs fastest: the convolutions in them are tried.

How long cuDNN takes for a slice depends on which of its algorithms knows that size, and which gets
the workspace that it asks for. Without tensor cores both matter much, and no rule for sizes
foretells either: ``python -m benchmarks kernels --question slices`` shows it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import inf
from time import perf_counter

from torch import nn

from belady.ir.hardware import HardwareProfile
from belady.ir.ops import Op, Phase
from belady.ir.plan import Section
from belady.planners.places import Chain, Sections, easier, with_sections
from belady.planners.sectioning import Sectioning
from belady.planners.slicework import inside
from belady.planners.workspace import convolves
from belady.sections.candidate import Candidate, chains
from belady.sections.timing import Convolution, Timing, can_be_tried
from belady.units import format_bytes, format_seconds

# So long after the first no other choice is tried: cuDNN takes seconds for some kinds. And what
# takes more than this of the time is not worth looking on from.
_SECONDS, _LESS = 40.0, 0.99

_log = logging.getLogger("belady")


class Race:
    """Times choices of slices of one call.

    Attributes
    ----------
    search
        Without workspaces: it says what is held beside a convolution.

    Parameters
    ----------
    whole
        Whether the call may run as it is, too.
    """

    def __init__(
        self,
        call: Candidate,
        search: Sectioning,
        timing: Timing,
        hardware: HardwareProfile,
        whole: bool = False,
    ) -> None:
        self._call, self.search, self._timing = call, search, timing
        self._hardware, self._whole = hardware, whole
        self._modules = dict(call.module.named_modules())
        self._chains = chains(call.module)
        ops = call.trace.ops
        self._convolutions = [it for it in ops if convolves(it) and it.phase is Phase.FORWARD]

    @property
    def knows_all(self) -> bool:
        """Whether there are convolutions, and every one can be tried."""
        modules = [self._modules.get(op.module) for op in self._convolutions]
        return bool(modules) and all(map(can_be_tried, modules))

    def fastest(self, choices: Sequence[Sections], room: int, limits: Sequence[int]) -> Sections:
        """The choice that takes least time, or one near it that takes less; empty for none at all.

        Parameters
        ----------
        choices
            At least one; the first is taken where nothing can be tried.
        room
            Bytes that an iteration may hold at its peak, less what an optimizer keeps.
        limits
            Budgets for the floor, in one of which every choice fits. What is near the fastest is
            to fit in the smallest in which that does.
        """
        tried: Iterable[Sections] = choices
        if self._whole and self.search.fits((), max(limits, default=0)):
            tried = [*choices, ()]
        _log.info("timing convolutions in slices, beside %s", format_bytes(room))
        best, least, until = choices[0], inf, inf
        timed: set[Sections] = set()
        while True:
            before = least
            for sections in tried:
                if perf_counter() >= until:
                    break
                timed.add(sections)
                seconds = self._seconds(sections, room)
                _log.info("%s: %s", _words(sections), format_seconds(seconds))
                # Without the first there is nothing to compare with, however long it takes.
                until = min(until, perf_counter() + _SECONDS)
                # The real modules run for an answer: asked last.
                if seconds < least and self.search.allows(sections):
                    best, least = sections, seconds
            if not least < _LESS * before:
                return best
            limit = min(filter(partial(self.search.fits, best), limits), default=0)
            # One by one: of a trace of many ops it takes a second to know whether sections fit.
            near = dict.fromkeys(it for it in _near(best, self._chains) if it or self._whole)
            left = [it for it in near if it not in timed]
            tried = filter(partial(self.search.fits, nbytes=limit), left)

    def _seconds(self, sections: Sections, room: int) -> float:
        """What convolutions take under ``sections``, and all ops for their bytes."""
        kernels = sum(times * self._timing(it) for times, it in self._slices(sections, room))
        return kernels + self._hardware.memory_seconds(self.search.work(sections))

    def _slices(self, sections: Sections, room: int) -> Iterator[tuple[int, Convolution]]:
        """Each convolution of a slice, and how many slices are as large."""
        trace, held = self.search.floor(sections)
        most: dict[str, int] = {}
        for op, nbytes in zip(trace.ops, held, strict=True):
            if convolves(op):
                most[op.module] = max(most.get(op.module, 0), nbytes)
        calls: Counter[str] = Counter()
        for op in self._convolutions:
            module, call = self._modules[op.module], calls[op.module]
            calls[op.module] += 1
            # Ops of modules that slices take apart, for a norm among them, are named by the
            # module around there.
            free = max(0, room - most.get(op.module, max(held)))
            yield from self._sizes(op, module, call, sections, free)

    def _sizes(
        self, op: Op, module: nn.Module, call: int, sections: Sections, free: int
    ) -> Iterator[tuple[int, Convolution]]:
        given = self._call.given(module, call)
        within = (it for it in sections if inside(op.module, it.modules))
        slices, along = next(((it.slices, it.along) for it in within), (1, 0))
        rows = 0 if given is None else given.shape[along]
        if given is None or not rows:
            return
        whole = self._call.trace
        made = sum(whole.storages[whole.values[value].storage].nbytes for value in op.writes)
        size, larger = divmod(rows, min(slices, rows))
        for times, part in ((larger, size + 1), (min(slices, rows) - larger, size)):
            if times:
                shape = (*given.shape[:along], part, *given.shape[along + 1 :])
                like = given.dtype, given.requires_grad, made * part // rows
                yield times, Convolution(module, shape, *like, free)


def _words(sections: Sections) -> str:
    """Sections for a log."""
    names = (f"{it.modules[0]} to {it.modules[-1]} by {it.slices}" for it in sections)
    return ", ".join(names) or "whole"


def _near(sections: Sections, chains: Sequence[Chain]) -> Iterator[Sections]:
    """Sections with more slices of one of them, or fewer; in two parts, or with what is beside."""
    for section in sections:
        yield with_sections(sections, [replace(section, slices=2 * section.slices)])
    yield from easier(sections)
    held_by = {name: it for it in sections for name in it.modules}
    for left, right in (pair for chain in chains for pair in pairwise(chain)):
        one, other = held_by.get(left), held_by.get(right)
        both = [it for it in (one, other) if it is not None]
        if one == other or len({it.along for it in both}) > 1:
            continue
        modules = (*(one.modules if one else (left,)), *(other.modules if other else (right,)))
        for slices in dict.fromkeys(it.slices for it in both):
            yield with_sections(sections, [Section(modules, slices, both[0].along)])
