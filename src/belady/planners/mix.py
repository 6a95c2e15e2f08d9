"""Values that leave the device: by copies, to be computed again, or but for a few bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from belady.ir import residency
from belady.ir.legality import check
from belady.ir.margin import still_ops
from belady.ir.plan import Assignment, Decision, Encode, Plan, Recompute
from belady.ir.replay import sources
from belady.ir.residency import offload_boundaries
from belady.planners.base import Draft, assemble
from belady.planners.due import due_by, schedule, timed
from belady.planners.moves import Case, movable, offloads, tier_for
from belady.planners.repairs import Which, bulky, heavy, light, worst
from belady.planners.sharing import early, joined, passed, unshared
from belady.planners.spread import Bytes, Spread, Times, alone, asked, held_bytes, keep, slack_of
from belady.planners.ways import Ways
from belady.planners.wish import Away, Wish

_COPIED = "moved: the budget has no room for it meanwhile"
_REPLAYED = "recomputed: the budget has no room for it meanwhile, and a copy would cost more"
_ENCODED = "encoded: backward asks for no more of it, and to copy or recompute it would cost more"
_KEPT = "kept: the budget has room for it between save and read"
# Times that a replay is taken back which needs bytes where there are none: fewer in large traces,
# where so many ops are looked through in all.
_REPAIRS_LEAST, _REPAIRS_MOST, _REPAIR_OPS = 12, 40, 20_000
# Times that more copied values are kept, as what is kept leaves more room.
_PASSES = 4
# Of more ops few mixes are tried, and of each one plan, in which what stays is found at once.
_LONG = 5_000
# Of all bytes that may move, what the smallest values together have that are not worth it.
DUST = 1e-3


class Fitting(NamedTuple):
    """A wish of which all that it lets leave the device fits, and the bytes left at each op."""

    wish: Wish
    away: Away
    slack: Bytes


class Mixer:
    """Makes plans of Keep, Offload, Recompute and Encode for one case.

    Parameters
    ----------
    dust
        Share of the bytes that the smallest values may have together which stay: each costs what a
        copy or a replay does beside its bytes, and is in the way of what a compiler would fuse.

    Attributes
    ----------
    ways
        How each value that may move can leave the device.
    dust
        Values that are too small for that.
    """

    def __init__(self, case: Case, planner: str, dust: float = 0.0) -> None:
        self._case = case
        self._planner = planner
        nbytes = {value: held_bytes(case, value) for value in movable(case.trace)}
        self.ways = Ways(case, _without_dust(nbytes, dust))
        self.dust = nbytes.keys() - self.ways.nbytes.keys()
        self._alone = alone(case.trace, self.ways.nbytes)
        self._largest = max(self.ways.nbytes.values(), default=0)
        self._moving = 1 - np.array(still_ops(case.trace), dtype=np.int64)
        self._begun: dict[Wish, Fitting | None] = {}
        self._shared: dict[tuple[Sequence[Assignment], float, float, float], Plan | None] = {}
        often = _REPAIR_OPS // max(1, len(case.trace.ops))
        self._repairs = max(_REPAIRS_LEAST, min(_REPAIRS_MOST, often))

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
        # Boundary of the first read of all that is made again with a value, and so as early.
        until = dict[int, int]()
        for value in sorted(left, key=lambda v: (trace.values[v].producer, v)):
            replay = self.ways.replay(value, until, encoded, wish.reach)
            worth = replay is not None and self.ways.worth(value, replay, wish.stretch)
            if value in wish.encoded or not worth:
                replay = None
            encodes = wish.encodes and value not in wish.plain
            encoding = self.ways.encodings.get(value) if encodes else None
            if encoding is not None and self.ways.cost_of(value, encoding) < self.ways.cost_of(
                value, replay
            ):
                encoded[value] = encoding
            elif replay is not None:
                replays[value] = replay
                with_it = (until.get(source, 0) for source in sources(trace, replay))
                until[value] = max(trace.values[value].first_read or 0, *with_it, 0)
        replays = early(trace, timed(trace, replays), wish.early)
        due = due_by(trace, replays)
        gone = {*kept, *replays, *encoded}
        others = [value for value in self.ways.nbytes if value not in gone]
        schedules = {value: schedule(trace, value, due.get(value)) for value in others}
        return Away(offloads(trace, tier_for(self._case, others), schedules), replays, encoded)

    def make(self, wish: Wish, times: Times) -> list[Plan]:
        """Plans that come near the wish; none where no repair makes it fit.

        What then stays makes replays later that others start from, which may not fit any more:
        a plan is to be checked.

        The second one, where there is room for it, has ops of several replays run once.

        Parameters
        ----------
        times
            Seconds at which compute is expected to reach each boundary.
        """
        begun = self._begin(wish)
        if begun is None:
            return []
        filled = self._filled(begun, wish)
        if filled is None:
            return []
        _, rest, slack = filled
        spread = Spread(self._case, rest.moves, times, slack)
        spread.widen()
        again = self._keep(replace(rest, moves={}), spread.slack, 0.0)
        left = {value: it for value, it in rest.replays.items() if value not in again}
        encoded = {value: it for value, it in rest.encoded.items() if value not in again}
        left = early(self._case.trace, timed(self._case.trace, left), wish.early)
        away = Away(spread.moves, left, encoded)
        plan = assemble(self._case, self.draft(away))
        # Mixes are often alike.
        alike = plan.assignments, wish.reach, wish.early, wish.spare
        if alike not in self._shared:
            self._shared[alike] = self._sharing(plan, wish, away)
        sharing = self._shared[alike]
        return [plan] if sharing is None else [plan, sharing]

    def _sharing(self, plan: Plan, wish: Wish, away: Away) -> Plan | None:
        """The plan with ops of several replays run once, where there is room; None if nowhere."""
        case, best = self._case, None
        if len(case.trace.ops) > _LONG:
            return None
        for share in (partial(passed, wish=wish), joined):
            slack = slack_of(case, best or plan) - self._spare(wish)
            replays = share(case.trace, away, self.ways, slack)
            if replays is None:
                continue
            shared = replace(away, replays=replays)
            made = assemble(case, self.draft(shared))
            if check(case.trace, case.hardware, made, case.budget).ok:
                best, away = made, shared
        return best

    def draft(self, away: Away) -> Draft:
        """The choices, with reasons."""
        reasons = dict.fromkeys(away.moves, _COPIED) | dict.fromkeys(away.replays, _REPLAYED)
        reasons |= dict.fromkeys(away.encoded, _ENCODED)
        draft = Draft(self._planner, _KEPT, reasons, away.moves, away.replays)
        return replace(draft, encoded=away.encoded, dust=self.dust)

    def room(self, away: Away) -> int:
        """Fewest bytes that the budget leaves during any op."""
        return int(self._slack(away).min(initial=0))

    def _slack(self, away: Away) -> Bytes:
        decisions: dict[int, Decision] = {**away.moves, **away.replays, **away.encoded}
        assignments = tuple(Assignment(value, it) for value, it in decisions.items())
        trace = self._case.trace.fingerprint
        return slack_of(self._case, Plan(trace, self._planner, self._case.budget, assignments))

    def _spare(self, wish: Wish) -> Bytes:
        """Bytes of the budget that the wish leaves during each op: none where nothing moves."""
        return int(wish.spare * self._case.budget.device_bytes) * self._moving

    def _begin(self, wish: Wish) -> Fitting | None:
        """All that may move away, without the replays that need too much memory."""
        wish = replace(wish, reserve=0.0, copies_first=False)
        if wish not in self._begun:
            self._begun[wish] = self._repaired(wish)
        return self._begun[wish]

    def _repaired(self, wish: Wish, kept: Collection[int] = ()) -> Fitting | None:
        """What may move away beside what is ``kept``, without replays that need too much memory."""
        for done in range(self._repairs):
            away = self.away(wish, kept)
            slack = self._slack(away) - self._spare(wish)
            if slack.min(initial=0) >= 0:
                return Fitting(wish, away, slack)
            # Little by little where that is enough; of long rows it never is.
            less = self._less(wish, away, slack, light if 2 * done < self._repairs else heavy)
            if less is None:
                return None
            wish = less
        return None

    def _less(self, wish: Wish, away: Away, slack: Bytes, which: Which) -> Wish | None:
        """The wish without replays that take what is lacking, or else without encodings that do."""
        lack = [(at, -int(slack[at])) for at in worst(slack)]
        found = [which(self._case, away.replays, away.moves, *it) for it in lack]
        if any(found):
            return self._without(wish, frozenset().union(*found))
        codes = [bulky(self._case.trace, away.encoded, self.ways, *it) for it in lack]
        return replace(wish, plain=wish.plain.union(*codes)) if any(codes) else None

    def _without(self, wish: Wish, replays: frozenset[int]) -> Wish:
        """The wish without these replays: what can be encoded is, rather than copied."""
        encoded = replays & self.ways.encodings.keys() if wish.encodes else frozenset()
        return replace(
            wish, values=wish.values - (replays - encoded), encoded=wish.encoded | encoded
        )

    def _filled(self, fitting: Fitting, asked: Wish) -> Fitting | None:
        """What does not stay: copied values stay first, as room is found; then others."""
        wish, away, slack = fitting
        if len(self._case.trace.ops) > _LONG:
            return self._repaired(wish, self._keep(away, slack, asked.reserve))
        kept = set[int]()
        for _ in range(_PASSES):
            wish, away, slack = fitting
            more = self._keep(replace(away, replays={}, encoded={}), slack, asked.reserve)
            kept |= more
            # What starts from kept values can be shorter, and made again where it could not be.
            again = self._repaired(wish, kept) if more else fitting
            if again is None:
                return None
            fitting = again
            if not more:
                break
        if asked.copies_first:
            return fitting
        wish, away, slack = fitting
        kept |= self._keep(replace(away, moves={}), slack, asked.reserve)
        return self._repaired(wish, kept)

    def _keep(self, away: Away, slack: Bytes, reserve: float) -> set[int]:
        """What stays: copied values first, and then what costs most."""
        trace, slack = self._case.trace, slack.copy()
        windows: dict[int, tuple[int, int]] = {}
        for value in asked(self._case, away.moves):
            if value in self._alone:
                _, free, back = offload_boundaries(trace, away.moves[value])
                released = trace.storages[trace.values[value].storage].released
                windows[value] = max(free, released), back
        again: dict[int, Recompute | Encode] = {**away.replays, **away.encoded}
        spared: dict[int, Recompute | Encode] = {**again, **unshared(trace, away.replays)}
        costs = {value: self.ways.cost_of(value, way) for value, way in spared.items()}
        spans = {value: residency.away(trace, value, way) for value, way in again.items()}
        for value in sorted(costs, key=lambda v: (-costs[v], spans[v][1], v)):
            windows[value] = spans[value]
        nbytes = {
            v: self.ways.saved[v] if v in away.encoded else self.ways.nbytes[v] for v in windows
        }
        return set(keep(windows, nbytes, slack, reserve * self._largest))


def _without_dust(nbytes: Mapping[int, int], dust: float) -> dict[int, int]:
    """Without the smallest, all of one size or none of it, up to a share of all bytes."""
    room, least = dust * sum(nbytes.values()), 0
    for size, count in sorted(Counter(nbytes.values()).items()):
        room -= size * count
        if room < 0:
            least = size
            break
    return {value: size for value, size in nbytes.items() if size >= least}
