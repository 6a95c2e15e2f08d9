"""Values that leave the device: some by copies, some to be computed again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from belady.ir import residency
from belady.ir.legality import check
from belady.ir.plan import Assignment, Offload, Plan, Recompute
from belady.ir.replay import compared_share, seconds_of, sources
from belady.ir.residency import offload_boundaries
from belady.ir.trace import Trace
from belady.planners.base import Draft, assemble
from belady.planners.moves import Case, Schedule, movable, offloads, read_by, tier_for
from belady.planners.replays import cheapest
from belady.planners.sharing import held, passing
from belady.planners.spread import Bytes, Spread, Times, alone, held_bytes, keep, slack_of

_COPIED = "moved: the budget has no room for it meanwhile"
_REPLAYED = "recomputed: the budget has no room for it meanwhile, and a copy would cost more"
_KEPT = "kept: the budget has room for it between save and read"
# Times that replays are taken back which need bytes where there are none.
_REPAIRS = 4
# Of more ops few mixes are tried, and of each one plan.
_LONG = 5_000


@dataclass(frozen=True, slots=True)
class Away:
    """Values that leave the device, by copies or to be computed again."""

    moves: Mapping[int, Offload]
    replays: Mapping[int, Recompute]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a mix should be like.

    Attributes
    ----------
    values
        To be recomputed rather than copied, unless they stay.
    stretch
        Most that a replay may cost, in multiples of what it costs when all else is kept. One that
        would start from what is recomputed too gets longer.
    reserve
        Bytes for copies under way rather than for kept values, in multiples of the largest value.
    reach
        Most ops between a replay and the first read of a recomputed value that it starts from,
        which is back that much earlier. What is read later is made twice.
    """

    values: frozenset[int]
    stretch: float = inf
    reserve: float = 0.0
    reach: float = 0.0


class Mixer:
    """Makes plans of Keep, Offload and Recompute for one case.

    Attributes
    ----------
    cost
        Seconds of the cheapest replay for each byte, of the values that have one.
    nbytes
        Device bytes of the values that may move.
    """

    def __init__(self, case: Case, planner: str) -> None:
        self._case = case
        self._planner = planner
        trace = case.trace
        self.nbytes = {value: held_bytes(case, value) for value in movable(trace)}
        self._last_reads = {value: _last_read(trace, value) for value in trace.saved}
        self._alone = alone(trace, self.nbytes)
        self._known: dict[int, list[tuple[dict[int, bool], Recompute | None]]] = {}
        self._replays: dict[int, Recompute] = {}
        for value in self.nbytes:
            replay = self._replay(value)
            if replay is not None:
                self._replays[value] = replay
        self.cost = {
            value: self._seconds_of(value, replay) / self.nbytes[value]
            for value, replay in self._replays.items()
        }
        self._begun: dict[Wish, tuple[Away, Bytes]] = {}

    def away(self, wish: Wish, kept: Collection[int] = ()) -> Away:
        """Recompute what is wished for where that may be, copy all else that may move.

        Parameters
        ----------
        kept
            Values that stay.
        """
        trace = self._case.trace
        replays: dict[int, Recompute] = {}
        # A replay starts from what was produced before, of which is known by then whether it stays.
        for value in sorted(wish.values, key=lambda v: (trace.values[v].producer, v)):
            replay = self._replay(value, replays, wish.reach) if value not in kept else None
            if replay is not None and self._worth(value, replay, wish.stretch):
                replays[value] = replay
        replays = _timed(trace, replays)
        due = _due(trace, replays)
        others = [value for value in self.nbytes if value not in replays and value not in kept]
        schedules = {value: _schedule(trace, value, due.get(value)) for value in others}
        return Away(offloads(trace, tier_for(self._case, others), schedules), replays)

    def make(self, wish: Wish, times: Times) -> list[Plan]:
        """Plans that come near the wish; none if they need more than the budget.

        The second one, where there is room for it, has what replays pass held for those after them.

        Parameters
        ----------
        times
            Seconds at which compute is expected to reach each boundary.
        """
        begun = self._begin(wish)
        if begun is None:
            return []
        kept = self._keep(*begun, wish.reserve)
        rest = self.away(wish, kept)
        spread = Spread(self._case, rest.moves, times, self._slack(rest))
        if spread.slack.min(initial=0) < 0:
            return []
        spread.widen()
        again = self._keep(Away({}, rest.replays), spread.slack, 0.0)
        left = {value: it for value, it in rest.replays.items() if value not in again}
        left = _timed(self._case.trace, left)
        plan = assemble(self._case, self.draft(Away(spread.moves, left)))
        sharing = self._sharing(plan, wish, spread.moves, left)
        return [plan] if sharing is None else [plan, sharing]

    def _sharing(
        self,
        plan: Plan,
        wish: Wish,
        moves: Mapping[int, Offload],
        replays: Mapping[int, Recompute],
    ) -> Plan | None:
        """The plan with what replays pass held for those after them; None where that cannot be."""
        case, trace = self._case, self._case.trace
        ways = passing(trace, replays) if len(trace.ops) <= _LONG else {}
        early = held(trace, replays, ways, self.nbytes, slack_of(case, plan)) if ways else ()
        if not early:
            return None

        def shorter(value: int) -> Recompute:
            at = trace.values[value].first_read or 0

            def usable(source: int) -> bool:
                if source in replays:
                    gap = (trace.values[source].first_read or 0) - at
                    return gap >= 0 and (gap <= wish.reach or source in early)
                there = moves[source].ready_by <= at if source in moves else True
                return there and self._last_reads[source] >= at

            return self._cheapest(value, usable) or replays[value]

        timed = _timed(trace, {value: shorter(value) for value in replays})
        made = assemble(case, self.draft(Away(moves, timed)))
        return made if check(trace, case.hardware, made, case.budget).ok else None

    def draft(self, away: Away) -> Draft:
        """The choices, with reasons."""
        reasons = dict.fromkeys(away.moves, _COPIED) | dict.fromkeys(away.replays, _REPLAYED)
        return Draft(self._planner, _KEPT, reasons, away.moves, away.replays)

    def room(self, away: Away) -> int:
        """Fewest bytes that the budget leaves during any op."""
        return int(self._slack(away).min(initial=0))

    def _slack(self, away: Away) -> Bytes:
        assignments = (
            *(Assignment(value, move) for value, move in away.moves.items()),
            *(Assignment(value, replay) for value, replay in away.replays.items()),
        )
        trace = self._case.trace.fingerprint
        return slack_of(self._case, Plan(trace, self._planner, self._case.budget, assignments))

    def _replay(
        self, value: int, dropped: Collection[int] = (), reach: float = 0.0
    ) -> Recompute | None:
        """Cheapest replay that starts from nothing that is ``dropped``, unless it is read soon."""
        trace = self._case.trace
        at = trace.values[value].first_read or 0

        def usable(source: int) -> bool:
            if source in dropped:
                return 0 <= (trace.values[source].first_read or 0) - at <= reach
            return self._last_reads[source] >= at

        return self._cheapest(value, usable)

    def _cheapest(self, value: int, usable: Callable[[int], bool]) -> Recompute | None:
        """Cheapest replay that starts from what is ``usable``."""
        for known, found in self._known.setdefault(value, []):
            if all(usable(source) is answer for source, answer in known.items()):
                return found
        # What the replay depends on, so that it is found again.
        answers: dict[int, bool] = {}

        def asked(source: int) -> bool:
            answers[source] = usable(source)
            return answers[source]

        replay = cheapest(self._case.trace, value, asked)
        self._known[value].append((answers, replay))
        return replay

    def _worth(self, value: int, replay: Recompute, stretch: float) -> bool:
        seconds = seconds_of(self._case.trace, self._replays[value])
        return stretch == inf or seconds_of(self._case.trace, replay) <= stretch * seconds

    def _seconds_of(self, value: int, replay: Recompute) -> float:
        """Seconds of a replay, and of the digests taken when the value is saved and made again."""
        case = self._case
        nbytes = case.trace.storages[case.trace.values[value].storage].nbytes
        digests = 2 * compared_share(case.trace) * case.hardware.memory_seconds(nbytes)
        return seconds_of(case.trace, replay) + digests

    def _begin(self, wish: Wish) -> tuple[Away, Bytes] | None:
        """All that may move away, with fewer replays where these need too much memory."""
        wish = replace(wish, reserve=0.0)
        for _ in range(_REPAIRS):
            if wish not in self._begun:
                away = self.away(wish)
                self._begun[wish] = away, self._slack(away)
            away, slack = self._begun[wish]
            short = np.flatnonzero(slack < 0)
            if not len(short):
                return away, slack
            fewer = wish.values - {v for v in away.replays if self._burdens(away, v, short)}
            if fewer == wish.values:
                return None
            wish = replace(wish, values=fewer)
        return None

    def _burdens(self, away: Away, value: int, short: Bytes) -> bool:
        """Whether a replay needs bytes where there are none: its own, or of what it starts from."""
        trace, replay = self._case.trace, away.replays[value]
        ends = [read_by(trace.values[v]) for v in sources(trace, replay) if v in away.moves]
        end = max([replay.at + 1, *ends])
        at = int(np.searchsorted(short, replay.at))
        return at < len(short) and int(short[at]) < end

    def _keep(self, away: Away, slack: Bytes, reserve: float) -> set[int]:
        """What stays: copied values first, those read first before others; then what costs most."""
        trace, slack = self._case.trace, slack.copy()
        windows: dict[int, tuple[int, int]] = {}
        for value in sorted(away.moves, key=lambda v: (away.moves[v].ready_by, v)):
            if value in self._alone:
                _, free, back = offload_boundaries(trace, away.moves[value])
                released = trace.storages[trace.values[value].storage].released
                windows[value] = max(free, released), back
        costs = {v: self._seconds_of(v, it) / self.nbytes[v] for v, it in away.replays.items()}
        for value in sorted(costs, key=lambda v: (-costs[v], away.replays[v].at, v)):
            windows[value] = residency.away(trace, value, away.replays[value])
        return set(keep(windows, self.nbytes, slack, reserve))


def _timed(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, Recompute]:
    """The replays, each at the first read or where another one that starts from it needs it."""
    found: dict[int, Recompute] = {}
    due: dict[int, int] = {}
    # A replay starts from what was produced before, so users come first here.
    for value in sorted(replays, key=lambda v: (-trace.values[v].producer, -v)):
        at = trace.values[value].first_read or 0
        found[value] = replace(replays[value], at=min(at, due.get(value, at)))
        for source in sources(trace, found[value]):
            due[source] = min(found[value].at, due.get(source, found[value].at))
    return found


def _due(trace: Trace, replays: Mapping[int, Recompute]) -> dict[int, int]:
    """Boundary at which the first replay that starts from a value needs it."""
    due: dict[int, int] = {}
    for replay in replays.values():
        for source in sources(trace, replay):
            due[source] = min(replay.at, due.get(source, replay.at))
    return due


def _schedule(trace: Trace, index: int, due: int | None) -> Schedule:
    value = trace.values[index]
    saved, back = value.first_save, read_by(value)
    return Schedule(saved - 1, saved + 1, back if due is None else min(back, due), due)


def _last_read(trace: Trace, index: int) -> int:
    return max((read for save in trace.values[index].saves for read in save.reads), default=-1)
