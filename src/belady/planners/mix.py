"""Values that leave the device: by copies, to be computed again, or but for a few bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from belady.ir import residency
from belady.ir.codecs import passes
from belady.ir.legality import check
from belady.ir.plan import Assignment, Decision, Encode, Offload, Plan, Recompute
from belady.ir.replay import compared_share, seconds_of, sources
from belady.ir.residency import offload_boundaries
from belady.planners.base import Draft, assemble
from belady.planners.due import due_by, last_read, schedule, timed
from belady.planners.moves import Case, encodings, movable, offloads, read_by, tier_for
from belady.planners.replays import cheapest
from belady.planners.sharing import held, passing
from belady.planners.spread import Bytes, Spread, Times, alone, held_bytes, keep, slack_of

_COPIED = "moved: the budget has no room for it meanwhile"
_REPLAYED = "recomputed: the budget has no room for it meanwhile, and a copy would cost more"
_ENCODED = "encoded: backward asks for no more of it, and to copy or recompute it would cost more"
_KEPT = "kept: the budget has room for it between save and read"
# Times that replays are taken back which need bytes where there are none.
_REPAIRS = 4
# Of more ops few mixes are tried, and of each one plan.
_LONG = 5_000


@dataclass(frozen=True, slots=True)
class Away:
    """Values that leave the device, by copies or to be computed again, or that are encoded."""

    moves: Mapping[int, Offload]
    replays: Mapping[int, Recompute]
    encoded: Mapping[int, Encode]


@dataclass(frozen=True, slots=True)
class Wish:
    """What a mix should be like.

    Attributes
    ----------
    values
        To be recomputed or encoded rather than copied, unless they stay.
    stretch
        Most that a replay may cost, in multiples of what it costs when all else is kept. One that
        would start from what is recomputed too gets longer.
    reserve
        Bytes for copies under way rather than for kept values, in multiples of the largest value.
    reach
        Most ops between a replay and the first read of a recomputed value that it starts from,
        which is back that much earlier. What is read later is made twice.
    encodes
        Whether those are encoded that lose less time so for each byte than by a replay.
    """

    values: frozenset[int]
    stretch: float = inf
    reserve: float = 0.0
    reach: float = 0.0
    encodes: bool = True


class Mixer:
    """Makes plans of Keep, Offload, Recompute and Encode for one case.

    Attributes
    ----------
    cost
        Seconds of the cheapest replay or encoding for each byte that it saves, of the values that
        have one.
    encodings
        The encoding of each value that has one.
    nbytes
        Device bytes of the values that may move.
    """

    def __init__(self, case: Case, planner: str) -> None:
        self._case = case
        self._planner = planner
        trace = case.trace
        self.nbytes = {value: held_bytes(case, value) for value in movable(trace)}
        self._last_reads = {value: last_read(trace, value) for value in trace.saved}
        self._alone = alone(trace, self.nbytes)
        self._known: dict[int, list[tuple[dict[int, bool], Recompute | None]]] = {}
        self._replays: dict[int, Recompute] = {}
        for value in self.nbytes:
            replay = self._replay(value)
            if replay is not None:
                self._replays[value] = replay
        self.encodings = encodings(case, self.nbytes)
        self._saved = self.nbytes | {
            value: self.nbytes[value] - case.hardware.allocator.held(it.nbytes)
            for value, it in self.encodings.items()
        }
        self.cost = {
            value: min(
                self._cost(value, self._replays.get(value)),
                self._cost(value, self.encodings.get(value)),
            )
            for value in (*self._replays, *self.encodings)
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
        replays, encoded = dict[int, Recompute](), dict[int, Encode]()
        left = [value for value in wish.values if value not in kept]
        # A replay starts from what was produced before, of which is known by then whether it stays.
        for value in sorted(left, key=lambda v: (trace.values[v].producer, v)):
            replay = self._replay(value, replays, encoded, wish.reach)
            if replay is not None and not self._worth(value, replay, wish.stretch):
                replay = None
            encoding = self.encodings.get(value) if wish.encodes else None
            if encoding is not None and self._cost(value, encoding) < self._cost(value, replay):
                encoded[value] = encoding
            elif replay is not None:
                replays[value] = replay
        replays = timed(trace, replays)
        due = due_by(trace, replays)
        gone = {*kept, *replays, *encoded}
        others = [value for value in self.nbytes if value not in gone]
        schedules = {value: schedule(trace, value, due.get(value)) for value in others}
        return Away(offloads(trace, tier_for(self._case, others), schedules), replays, encoded)

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
        again = self._keep(replace(rest, moves={}), spread.slack, 0.0)
        left = {value: it for value, it in rest.replays.items() if value not in again}
        encoded = {value: it for value, it in rest.encoded.items() if value not in again}
        away = Away(spread.moves, timed(self._case.trace, left), encoded)
        plan = assemble(self._case, self.draft(away))
        sharing = self._sharing(plan, wish, away)
        return [plan] if sharing is None else [plan, sharing]

    def _sharing(self, plan: Plan, wish: Wish, away: Away) -> Plan | None:
        """The plan with what replays pass held for those after them; None where that cannot be."""
        case, trace, replays, moves = self._case, self._case.trace, away.replays, away.moves
        ways = passing(trace, replays) if len(trace.ops) <= _LONG else {}
        early = held(trace, replays, ways, self.nbytes, slack_of(case, plan)) if ways else ()
        if not early:
            return None

        def shorter(value: int) -> Recompute:
            at = trace.values[value].first_read or 0

            def usable(source: int) -> bool:
                if source in away.encoded:
                    return False
                if source in replays:
                    gap = (trace.values[source].first_read or 0) - at
                    return gap >= 0 and (gap <= wish.reach or source in early)
                there = moves[source].ready_by <= at if source in moves else True
                return there and self._last_reads[source] >= at

            return self._cheapest(value, usable) or replays[value]

        shared = timed(trace, {value: shorter(value) for value in replays})
        made = assemble(case, self.draft(replace(away, replays=shared)))
        return made if check(trace, case.hardware, made, case.budget).ok else None

    def draft(self, away: Away) -> Draft:
        """The choices, with reasons."""
        reasons = dict.fromkeys(away.moves, _COPIED) | dict.fromkeys(away.replays, _REPLAYED)
        reasons |= dict.fromkeys(away.encoded, _ENCODED)
        return Draft(self._planner, _KEPT, reasons, away.moves, away.replays, encoded=away.encoded)

    def room(self, away: Away) -> int:
        """Fewest bytes that the budget leaves during any op."""
        return int(self._slack(away).min(initial=0))

    def _slack(self, away: Away) -> Bytes:
        decisions: dict[int, Decision] = {**away.moves, **away.replays, **away.encoded}
        assignments = tuple(Assignment(value, it) for value, it in decisions.items())
        trace = self._case.trace.fingerprint
        return slack_of(self._case, Plan(trace, self._planner, self._case.budget, assignments))

    def _replay(
        self,
        value: int,
        dropped: Collection[int] = (),
        encoded: Collection[int] = (),
        reach: float = 0.0,
    ) -> Recompute | None:
        """Cheapest replay that starts from nothing ``dropped``, unless it is read soon."""
        trace = self._case.trace
        at = trace.values[value].first_read or 0

        def usable(source: int) -> bool:
            if source in encoded:
                return False
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

    def _cost(self, value: int, way: Recompute | Encode | None) -> float:
        """Seconds for each byte that is saved; digests are taken of what is made again."""
        case = self._case
        if way is None:
            return inf
        nbytes = case.trace.storages[case.trace.values[value].storage].nbytes
        if isinstance(way, Encode):
            both = passes(way, nbytes)
            return case.hardware.memory_seconds(both.encode + both.decode) / self._saved[value]
        digests = 2 * compared_share(case.trace) * case.hardware.memory_seconds(nbytes)
        return (seconds_of(case.trace, way) + digests) / self.nbytes[value]

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
        again: dict[int, Recompute | Encode] = {**away.replays, **away.encoded}
        costs = {value: self._cost(value, way) for value, way in again.items()}
        spans = {value: residency.away(trace, value, way) for value, way in again.items()}
        for value in sorted(costs, key=lambda v: (-costs[v], spans[v][1], v)):
            windows[value] = spans[value]
        nbytes = {v: self._saved[v] if v in away.encoded else self.nbytes[v] for v in windows}
        return set(keep(windows, nbytes, slack, reserve))
