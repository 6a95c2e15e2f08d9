"""Copy what the links can hide, compute again what is cheap, keep what there is room for."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from belady.errors import InfeasibleBudgetError
from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Plan
from belady.ir.replay import shares
from belady.ir.trace import Trace
from belady.planners.base import finish
from belady.planners.lifetime import LIFETIME
from belady.planners.mix import DUST, Mixer
from belady.planners.moves import Case
from belady.planners.price import BEGUN, KEPT, price
from belady.planners.segments import segmented
from belady.planners.spread import Times, boundary_times
from belady.planners.traits import Traits
from belady.planners.wish import Away, Neighbours, Wish, with_limit
from belady.simulate.blocks import excess
from belady.simulate.engine import iteration_seconds, kernel_seconds, simulate

# Steps from recomputing nothing to recomputing all that can be.
_PARTS = 64
_STRETCHES = (inf, 2.0, 1.0)
_RESERVES = (0.0, 2.0, 6.0, inf)
_SPARES = (0.0, 0.01, 0.02, 0.04)
_REACHES = (0.0, 8.0, 16.0, 32.0, 128.0, inf)
_EARLY = (0.0, 16.0, 64.0)
# Reaches and reserves that are tried first: with a reach that spans a block, or a part of one, rows
# of replays are made once, and where nothing stays before copies have room, links carry what they
# can hide. Other limits are then tried with so many of them, as the best one can lead nowhere.
_BEGUN = ((32.0, 0.0), (32.0, inf), (0.0, 0.0), (8.0, 0.0), (8.0, inf))
_LED_ON = 2
# Mixes that are tried, and ops that are planned in all of them: a large trace gets fewer.
_FEWEST, _MOST, _OPS = 8, 450, 150_000
# Of fewer tries these segments are among those that are tried first.
_FEW, _FEW_SEGMENTS = 40, 2
# Share of the iteration below which stalls are not worth another try, and what all of it may lose
# before single values are exchanged.
_NOTHING, _NEAR = 0.002, 1.01
# Exchanges: how much worse a mix may be at first, and what one that is known counts as among tries.
_HEAT, _WORSE, _KNOWN = 0.01, 3.0, 0.02


# Mild and steep, see `_Search`.
Prices = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Hybrid:
    """The mix of copies and replays that simulates fastest.

    Copies that are hidden cost nothing, up to what a link carries between save and read; a replay
    costs its kernels. So values near the turn from forward to backward stay as far as there is
    room, early ones, whose gap is longest, are copied, and between them those with the cheapest
    replays are recomputed. How many that should be is found by simulation. It starts from the plan
    of `belady.planners.lifetime.Lifetime`, so it is never slower where torch's blocks fit into one
    another (`belady.simulate.blocks`): a mix whose blocks do not counts as slower.
    """

    name: str = "hybrid"
    version: int = 21
    traits: Traits = Traits(recomputes=True, fills=True, slices_losses=True)

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact."""
        case = Case(trace, hardware, budget, exact)
        mixer, plan = self._begun(case)
        plans = [plan]
        with suppress(InfeasibleBudgetError):
            copies = LIFETIME(trace, hardware, budget, exact=exact)
            plans.append(replace(copies, planner=plans[0].planner))
        search = _Search(case, mixer, plans)
        return search.run() if mixer.ways.cost else search.best

    def _begun(self, case: Case) -> tuple[Mixer, Plan]:
        """What makes plans of this policy, and the one that takes least; all moves if need be."""
        name = f"{self.name}/{self.version}"
        mixer = Mixer(case, name, DUST)
        try:
            return mixer, finish(case, mixer.draft(_leanest(mixer)))
        except InfeasibleBudgetError:
            if not mixer.dust:
                raise
        mixer = Mixer(case, name)
        return mixer, finish(case, mixer.draft(_leanest(mixer)))


class _Search:
    """Tries mixes by simulation: how many replays, then which.

    What a mix counts as is its price: seconds, and more where its blocks do not fit. Where to go
    from is asked of mild prices, what to keep of steep ones: where only steep ones counted, plans
    that fit and are slow kept the search from all others.

    Attributes
    ----------
    best
        The plan of the lowest price so far.
    """

    def __init__(self, case: Case, mixer: Mixer, plans: Sequence[Plan]) -> None:
        self._case = case
        self._mixer = mixer
        prices = [self._priced(plan, plan.predicted_seconds)[1] for plan in plans]
        self._price = min(prices)
        self.best = plans[prices.index(self._price)]
        # All that a plan decides takes seconds, so none has a lower price.
        self._least = iteration_seconds(
            case.trace, case.hardware, replace(self.best, assignments=())
        )
        self._times = boundary_times(case.trace, simulate(case.trace, case.hardware, self.best))
        self._left: float = max(_FEWEST, min(_MOST, _OPS // max(1, len(case.trace.ops))))
        self._prices: dict[Wish, float] = {}
        # Seconds, and prices once asked for, of what was judged: mixes are often alike.
        self._judged: dict[Sequence[Assignment], tuple[float, Prices | None]] = {}
        self._segments = [*segmented(case.trace, mixer.ways.nbytes, mixer.ways.cost)]
        self._limits: dict[str, Sequence[Any]] = {
            "reach": _REACHES,
            "early": _EARLY if shares(case.trace) else (0.0,),
            "stretch": _STRETCHES,
            "encodes": (True, False) if mixer.ways.encodings else (True,),
            "copies_first": (False, True),
            "reserve": _RESERVES,
            "spare": _SPARES,
        }

    def run(self) -> Plan:
        """The plan of the lowest price found."""
        self._exchange(self._descended())
        return self.best

    def _descended(self) -> Wish:
        """The mix of the lowest price, from parts of all values or from segments of the network."""
        parts = _parts(self._case.trace, self._mixer)
        some, segments = parts[:: _PARTS // 4], self._segments
        replayed = [*some[1:], *segments]
        begun = [[some[0], *replayed], *[replayed] * (len(_BEGUN) - 1)]
        if self._left < _FEW:
            begun = [[*some[1:], *segments[:_FEW_SEGMENTS]]]
        starts = [
            [Wish(values, reach=reach, reserve=reserve) for values in of]
            for of, (reach, reserve) in zip(begun, _BEGUN, strict=False)
        ]
        found = [self._halved(self._cheapest(it), parts) for it in starts]
        best = sorted(found, key=lambda wish: self._prices[wish])[:_LED_ON]
        return self._cheapest([self._bettered(it) for it in best])

    def _halved(self, at: Wish, parts: Sequence[frozenset[int]]) -> Wish:
        """The mix with the part of the lowest price, by steps that are halved."""
        step = _PARTS // 8
        while step and at.values in parts:
            here = parts.index(at.values)
            sides = [parts[by] for by in (here - step, here + step) if 0 <= by <= _PARTS]
            at = self._cheapest([at, *(replace(at, values=values) for values in sides)])
            step //= 2
        return at

    def _bettered(self, at: Wish) -> Wish:
        """The mix with the limits of the lowest price, found one after another."""
        for name, choices in self._limits.items():
            at = self._cheapest(with_limit(at, name, it) for it in choices)
        return at

    def _exchange(self, at: Wish) -> None:
        """Turn copies of neighbours in time into replays and back, at first also for the worse.

        Simulated annealing (Kirkpatrick et al., Science 220, 1983): a mix whose blocks fit into one
        another may lie behind some that do not.
        """
        trace, kernels = self._case.trace, sum(kernel_seconds(self._case.trace, self.best))
        neighbours = Neighbours(trace, self._mixer.ways.cost, self._limits)
        rng, tries = random.Random(0), max(1.0, self._left)
        now, unstalled = self._prices[at], boundary_times(trace, None)
        while self._left > 0 and self._price > max(_NEAR * kernels, self._least):
            heat = _HEAT * self._left / tries
            other = neighbours.one(rng, at)
            if other in self._prices:
                self._left -= _KNOWN
            price = self._try(other, (self._times, unstalled), now * (1 + _WORSE * heat))
            if price < now * (1 + heat * min(_WORSE, rng.expovariate(1.0))):
                at, now = other, price

    def _cheapest(self, wishes: Iterable[Wish]) -> Wish:
        unstalled = boundary_times(self._case.trace, None)
        return min(wishes, key=lambda wish: self._try(wish, (unstalled,), self._price))

    def _try(self, wish: Wish, begun: Sequence[Times], most: float) -> float:
        """The price of a mix, or, where that is above ``most``, some lower bound of it."""
        if wish not in self._prices:
            self._prices[wish] = inf
            # Replays and copies make compute later, which changes when copies are due.
            for guess in begun:
                times: Times | None = guess
                while times is not None and self._left > 0 and self._price > self._least:
                    self._left -= 1
                    times = self._settle(wish, times, most)
        return self._prices[wish]

    def _settle(self, wish: Wish, times: Times, most: float) -> Times | None:
        """Try a mix; give the boundary times that it leads to if none is better by now."""
        after = None
        for plan in self._mixer.make(wish, times):
            found = self._judge(wish, plan, most)
            after = after if found is None else found
        return after

    def _judge(self, wish: Wish, plan: Plan, most: float) -> Times | None:
        """Keep a plan of a mix if none is better by now; gives its boundary times then."""
        case = self._case
        mild, price = self._prices_of(plan, max(most, self._price))
        known, self._prices[wish] = self._prices[wish], min(self._prices[wish], mild)
        if price >= self._price:
            return None
        verdict = check(case.trace, case.hardware, plan, case.budget)
        if not verdict.ok:
            self._judged[plan.assignments] = inf, (inf, inf)
            self._prices[wish] = known
            return None
        timeline = simulate(case.trace, case.hardware, plan)
        peak, seconds = verdict.peak_bytes, timeline.seconds
        self.best = replace(plan, predicted_peak_bytes=peak, predicted_seconds=seconds)
        self._price = price
        self._times = boundary_times(case.trace, timeline)
        return self._times if timeline.stall_seconds > _NOTHING * seconds else None

    def _prices_of(self, plan: Plan, most: float) -> Prices:
        """Mild and steep price; only its seconds where these are above ``most``."""
        seconds, prices = self._judged.get(plan.assignments, (-1.0, None))
        if seconds < 0:
            seconds = iteration_seconds(self._case.trace, self._case.hardware, plan)
        if prices is None and seconds < most:
            prices = self._priced(plan, seconds)
        self._judged[plan.assignments] = seconds, prices
        return prices or (seconds, seconds)

    def _priced(self, plan: Plan, seconds: float) -> Prices:
        """Mild and steep price: its seconds, or more where its blocks lack a part of the budget."""
        over = excess(self._case.trace, plan, self._case.hardware.allocator)
        return price(seconds, over, BEGUN), price(seconds, over, KEPT)


def _parts(trace: Trace, mixer: Mixer) -> list[frozenset[int]]:
    """More and more of what can be recomputed: cheapest first, of equals the last saved."""
    cost, held = mixer.ways.cost, mixer.ways.nbytes
    order = sorted(cost, key=lambda v: (cost[v], -trace.values[v].first_save, v))
    total = sum(held[value] for value in order)
    parts, chosen, nbytes = [], list[int](), 0
    pending = iter(order)
    for part in range(_PARTS + 1):
        while nbytes < total * part // _PARTS:
            chosen.append(next(pending))
            nbytes += held[chosen[-1]]
        parts.append(frozenset(chosen))
    return parts


def _leanest(mixer: Mixer) -> Away:
    """Of the plans that keep nothing, the one with the lowest peak."""
    every = frozenset(mixer.ways.cost)
    # A replay leaves no byte, an encoding a few, so without encodings the peak can be lower.
    both = (True, False) if mixer.ways.encodings else (True,)
    wishes = [Wish(every, stretch, encodes=it) for it in both for stretch in _STRETCHES]
    wishes = [Wish(frozenset()), *wishes]
    return max((mixer.away(wish) for wish in wishes), key=mixer.room)


HYBRID = Hybrid()
