"""tvDNN's integer linear program: the policy ``tvdnn_ilp``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Keep, Plan
from belady.ir.trace import Trace
from belady.planners.base import attempt
from belady.planners.moves import Case
from belady.planners.traits import Traits
from belady.planners.tvdnn import Swapping
from belady.planners.tvdnn_branch import Search
from belady.planners.tvdnn_chain import Chain, chain_of
from belady.planners.tvdnn_greedy import schedule
from belady.planners.tvdnn_model import EPSILON, Model, size
from belady.planners.tvdnn_solver import Answer, Program, solver

# Part by which a schedule that counts as the fastest may exceed it, to move fewer bytes or so.
TOLERANCE = 2 * EPSILON
# Whole variables above which the solver is not asked: it would only use up its time.
_LARGEST = 20_000
# The same for the gaps of a chain.
_LONGEST = 200
# Part of the iteration for which no set of a chain's gaps is looked for.
_GAP = 1e-5


@dataclass(frozen=True, slots=True)
class TvdnnIlp:
    """The swap schedule with the least stall, and of equals that with the fewest bytes moved.

    `belady.planners.tvdnn_model` has the program, a reconstruction (`belady.planners.tvdnn`). For
    a chain it is solved by a branch and bound of its own (`belady.planners.tvdnn_branch`), for
    all else by HiGHS. The schedule of `belady.planners.tvdnn_greedy.TvdnnGreedy` is a bound from
    the start, and the plan where no other is found that simulates faster. The reasons in the
    plan say which it is and how far from the best it can be. Plans are the same every time if
    the search ends within its time.

    Attributes
    ----------
    limit_s
        Seconds for the search.
    """

    name: str = "tvdnn_ilp"
    version: int = 3
    traits: Traits = Traits(slices_modules=True)
    limit_s: float = 60.0

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact.

        Raises
        ------
        MissingExtraError
            If something has to move in what is no chain, and SciPy is not installed.
        """
        swapping = Swapping(Case(trace, hardware, budget, exact))
        planner = f"{self.name}/{self.version}"
        # What does not fit when all gaps are used fits in no schedule: that is known from here on.
        quick = schedule(swapping, planner)
        if quick.moves_nothing:
            return quick
        chain = chain_of(swapping)
        if chain is not None and len(chain.gaps) <= _LONGEST:
            return _judge(
                swapping, _branched(swapping, chain, quick, self.limit_s), quick, self.limit_s
            )
        solve = solver()
        choices = size(swapping)
        if choices > _LARGEST:
            faster = quick.predicted_seconds / swapping.keep_seconds - 1
            why = f"the program is too large, with {choices} choices, no schedule of it is"
            return _because(quick, f"heuristic; {why} {faster:.2%} faster")
        found = _solved(Model(swapping), solve, quick, self.limit_s)
        return _judge(swapping, found, quick, self.limit_s)


TVDNN_ILP = TvdnnIlp()


@dataclass(frozen=True, slots=True)
class _Found:
    """What a search came to.

    Attributes
    ----------
    schedule
        Boundaries at which the bytes of the gaps that are used go and come, by index.
    seconds
        Those of an iteration that no schedule beats, as far as is known.
    complete
        Whether it ended within its time.
    """

    schedule: Mapping[int, tuple[int, int]] | None
    seconds: float
    complete: bool


def _branched(swapping: Swapping, chain: Chain, quick: Plan, limit_s: float) -> _Found:
    deadline, keep = time.monotonic() + limit_s, swapping.keep_seconds
    byte_cost = EPSILON * keep / sum(gap.nbytes for gap in swapping.gaps)
    moved = sum(gap.nbytes for gap in swapping.gaps if quick.decisions.keys() & gap.moves.keys())
    cost = quick.predicted_seconds - keep + byte_cost * moved
    best = Search(chain, cost, byte_cost, _GAP * keep).run(deadline)
    schedule = None if best.used is None else chain.schedule(best.used)
    return _Found(schedule, keep + best.stall, best.complete)


def _solved(
    model: Model, solve: Callable[[Program, float], Answer], quick: Plan, limit_s: float
) -> _Found:
    model.limit_seconds(quick.predicted_seconds * (1 + TOLERANCE))
    answer = solve(model.program, limit_s)
    schedule = None if answer.solution is None else model.schedule(answer.solution)
    return _Found(schedule, model.seconds(answer.bound), answer.complete)


def _judge(swapping: Swapping, found: _Found, quick: Plan, limit_s: float) -> Plan:
    """The faster of the schedule that was found and the heuristic's, with what is known of it."""
    made = None
    if found.schedule is not None:
        moves = {
            value: move
            for index, (free, back) in found.schedule.items()
            for value, move in swapping.gaps[index].away(free, back).items()
        }
        made = attempt(swapping.case, swapping.draft(quick.planner, moves, ""))
    if made is None or made.predicted_seconds > quick.predicted_seconds * (1 + TOLERANCE):
        made = None
    best, whose = (quick, "heuristic") if made is None else (made, "integer program")
    if not found.complete:
        gap = max(0.0, best.predicted_seconds / max(found.seconds, swapping.keep_seconds) - 1)
        less = "" if found.schedule is not None else " without a schedule"
        stopped = f"the program was stopped after {limit_s:g} s{less}"
        return _because(best, f"{whose}; {stopped}, no schedule of it is {gap:.2%} faster")
    if made is None and found.schedule is not None:
        return _because(best, f"{whose}; the program's schedule does no better in simulation")
    return _because(best, f"{whose}; the program has no faster schedule")


def _because(plan: Plan, why: str) -> Plan:
    """The plan with this reason for all that moves."""
    reason = f"moved: tvDNN's {why}"
    return replace(
        plan,
        assignments=tuple(
            it if isinstance(it.decision, Keep) else replace(it, reason=reason)
            for it in plan.assignments
        ),
    )
