"""Which modules to run in slices, and in how many, so that no single op is over the budget.

What a plan moves or recomputes is what autograd saves; what one op needs while it runs is the floor
under every plan. Cutting modules along the batch lowers it (tvDNN: Park et al., PPoPP 2018,
"memory-object sectioning"; the choice here is ours), or along the tokens where samples are few.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from operator import itemgetter

from belady.errors import PlanMismatchError
from belady.ir.along import Dims, seen_along
from belady.ir.collector import uncollected
from belady.ir.finding import find
from belady.ir.plan import Section
from belady.ir.sections import apply
from belady.ir.trace import Trace
from belady.planners.least import Least
from belady.planners.places import (
    Chain,
    Order,
    Places,
    Sections,
    easier,
    may_replace,
    with_sections,
)
from belady.planners.slicework import Work, inside

# More slices make kernels too small to be of use; a longer stretch does more.
_SLICES = (2, 4, 8, 16, 32, 64)
# Most ops of one section in all of its slices: more are no longer planned in a minute.
_OPS = 100_000
_ROUNDS = 16
# How many with less work that do not fit are tried before it is left at that: fewer of more
# sections than so many.
_EASIER, _MANY = 40, 8
# Work in slices, of that without, which is worth no search for less.
_LITTLE = 1.03
_ORDERS: tuple[Order, ...] = (len, lambda it: -len(it))
# The batch first: slices of it are dense, and more is known to treat samples by themselves.
_ALONGS = (0, 1)


def over_budget(trace: Trace, least: Least) -> int:
    """Bytes that ``trace`` needs at least beyond the budget; negative where there is room."""
    return least.needed(trace)[0] - least.budget.device_bytes


def _unknown(_along: int) -> Dims | None:
    return None


class Sectioning:
    """The search for sections of one trace, which remembers what it has judged.

    Parameters
    ----------
    trace
        Unsectioned, with module paths.
    least
        What plans need of it; the device's bytes are given for each search.
    chains
        What may be cut from.
    may
        Whether a section may run in slices; asked of few.
    dims
        Where rows along another dimension than the batch are, see `belady.ir.along`; asked late.

    Attributes
    ----------
    work
        What running under sections costs, in bytes.
    """

    def __init__(
        self,
        trace: Trace,
        least: Least,
        chains: Sequence[Chain],
        may: Callable[[Section], bool],
        dims: Callable[[int], Dims | None] = _unknown,
    ) -> None:
        self._trace = trace
        self._dims = dims
        self._least = least
        self._may = may
        self.work = Work(trace)
        self._known: dict[Sections, tuple[int, str]] = {}
        self._allowed: dict[tuple[Chain, int], bool] = {}
        self._counts: dict[tuple[Chain, int], tuple[int, ...]] = {}
        self._places = Places(trace, chains)

    def floor(self, sections: Sections) -> tuple[Trace, Sequence[int]]:
        """The trace under ``sections``, and the bytes that the floor holds during each of its ops.

        Raises
        ------
        PlanMismatchError
            If it does not show what is needed to cut them.
        """
        trace = self._under(sections)
        return trace, self._least.held_by_floor(trace)

    def fits(self, sections: Sections, nbytes: int) -> bool:
        """Whether a plan fits in ``nbytes`` under sections."""
        return self._needed(sections)[0] <= nbytes

    def allows(self, sections: Sections) -> bool:
        """Whether all of them may be."""
        return all(map(self._is_allowed, sections))

    def within(self, nbytes: int) -> Sections | None:
        """The least work in slices with which a plan fits in ``nbytes``; None if none do.

        Empty if it fits as it is. Whoever runs them changes the order of sums.
        """
        found = [it for order in _ORDERS for it in (self._found(order, nbytes),) if it is not None]
        refined = (self._refined(it, nbytes) for it in found)
        return min(refined, key=self.work, default=None)

    def _found(self, order: Order, nbytes: int) -> Sections | None:
        """Sections with which a plan fits, by the least change of the worst module each time."""
        chosen: Sections = ()
        for _ in range(_ROUNDS):
            needed, at = self._needed(chosen)
            if needed <= nbytes:
                return chosen
            better = next(self._better(order, chosen, at, nbytes), None)
            if better is None:
                return None
            chosen = self._also_alike(chosen, better, nbytes)
        return None

    def _also_alike(self, before: Sections, chosen: Sections, nbytes: int) -> Sections:
        """With the same in as many layers like that of what is new as would be the worst next."""
        for section in [it for it in chosen if it not in before]:
            others = [it for it in self._places.alike(section) if all(may_replace(it, chosen))]
            enough = partial(self._is_enough, chosen, others, nbytes)
            found = bisect_left(range(len(others)), True, key=enough)
            if self.allows(tuple(others[:found])):
                chosen = with_sections(chosen, others[:found])
        return chosen

    def _is_enough(
        self, chosen: Sections, others: Sequence[Section], nbytes: int, count: int
    ) -> bool:
        """Whether so many of ``others`` are enough for the rest not to be the worst."""
        left, at = self._needed(with_sections(chosen, others[:count]))
        return left <= nbytes or not any(inside(at, it.modules) for it in others[count:])

    def _helps(self, sections: Sections, new: Section, before: int, nbytes: int) -> bool:
        """Whether with ``new`` its modules are no longer the worst."""
        left, where = self._needed(sections)
        return left <= nbytes or (left <= before and not inside(where, new.modules))

    def _refined(self, sections: Sections, nbytes: int) -> Sections:
        """With less work, if they add much: fewer slices, or of parts of stretches, while all fits.

        Where they add little, more slices leave more room: they stay.
        """
        while (now := self.work(sections)) > _LITTLE * self.work(()):
            candidates = ((self.work(it), it) for it in dict.fromkeys(easier(sections)))
            less = sorted((it for it in candidates if it[0] < now), key=itemgetter(0))
            found = self._first_that_fits([it for _, it in less], nbytes)
            if found is None:
                break
            sections = found
        return sections

    def _first_that_fits(self, candidates: Sequence[Sections], nbytes: int) -> Sections | None:
        failed: list[dict[str, int]] = []
        for sections in candidates:
            slices = {name: it.slices for it in sections for name in it.modules}
            # Nowhere in more slices than what did not fit.
            if any(all(k <= it.get(name, 1) for name, k in slices.items()) for it in failed):
                continue
            if self._needed(sections)[0] > nbytes:
                failed.append(slices)
            elif self.allows(sections):
                return sections
            if len(failed) * max(_MANY, len(sections)) >= _MANY * _EASIER:
                break
        return None

    def _better(self, order: Order, chosen: Sections, at: str, nbytes: int) -> Iterator[Sections]:
        """Sections with which module ``at`` is no longer that much over, least change first."""
        each = product(_ALONGS, list(self._candidates(order, chosen, at)))
        for along, stretches in each:
            helping = (self._fewest(chosen, modules, along, nbytes) for modules in stretches)
            found = [it for it in helping if it is not None]
            for section in sorted(found, key=lambda it: it.slices):
                # The real module runs for an answer: asked last.
                if self._is_allowed(section):
                    yield with_sections(chosen, [section])

    def _fewest(self, chosen: Sections, modules: Chain, along: int, nbytes: int) -> Section | None:
        """A stretch in the fewest slices with which its modules are not the worst; None if none.

        More slices need less, as long as what is in one is worth moving: by bisection.
        """
        needed, _ = self._needed(chosen)
        same = (it.slices for it in chosen if (it.modules, it.along) == (modules, along))
        present = next(same, 1)
        counts = [it for it in self._possible(modules, along) if it > present]

        def cut(slices: int) -> tuple[Sections, Section]:
            section = Section(modules, slices, along)
            return with_sections(chosen, [section]), section

        def helps(slices: int) -> bool:
            return self._helps(*cut(slices), needed, nbytes)

        while counts and self._needed(cut(counts[-1])[0])[0] > needed:
            counts.pop()
        index = bisect_left(counts, True, key=helps)
        return Section(modules, counts[index], along) if index < len(counts) else None

    def _possible(self, modules: Chain, along: int) -> tuple[int, ...]:
        """Numbers of slices in which a stretch can run, fewest first."""
        if (modules, along) not in self._counts:
            section = Section(modules, _SLICES[0], along)
            try:
                stretches = find(self._seen((section,)), [section])
            except PlanMismatchError:
                stretches = []
                if along and self._dims(along) is not None:
                    # What mixes tokens often shows it here; whoever knows the reason takes it down.
                    self._may(section)
            samples = min((sum(it.sizes) for it in stretches), default=0)
            ops = sum(len(it.forward) + len(it.backward) for it in stretches)
            # Of few samples each can be a slice.
            counts = {min(it, samples) for it in _SLICES}
            self._counts[modules, along] = tuple(
                sorted(it for it in counts if it > 1 and it * ops <= _OPS)
            )
        return self._counts[modules, along]

    def _candidates(self, order: Order, chosen: Sections, at: str) -> Iterator[Sequence[Chain]]:
        """What to cut, or cut finer, so that module ``at`` is not the worst."""
        present = next((it for it in chosen if inside(at, it.modules)), None)
        if present is not None:
            yield [present.modules]
        yield from self._places.around(at, order)

    def _is_allowed(self, section: Section) -> bool:
        """Whether it may be cut at all, asked once for all numbers of slices."""
        key = section.modules, section.along
        if key not in self._allowed:
            self._allowed[key] = self._may(section)
        return self._allowed[key]

    def _seen(self, sections: Sections) -> Trace:
        return seen_along(self._trace, sections, self._dims)

    def _needed(self, sections: Sections) -> tuple[int, str]:
        """Bytes of the smallest budget, and the module of the op that needs most."""
        if sections not in self._known:
            with uncollected():
                self._known[sections] = self._judged(sections)
        return self._known[sections]

    def _judged(self, sections: Sections) -> tuple[int, str]:
        try:
            trace = self._under(sections)
        except PlanMismatchError:
            return 1 << 62, ""
        return self._least.needed(trace)

    def _under(self, sections: Sections) -> Trace:
        return apply(self._seen(sections), sections) if sections else self._trace
