"""tvDNN's integer linear program: the policy ``tvdnn_ilp``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Keep, Plan
from belady.ir.trace import Trace
from belady.planners.base import attempt
from belady.planners.moves import Case
from belady.planners.tvdnn import Swapping
from belady.planners.tvdnn_greedy import schedule
from belady.planners.tvdnn_model import EPSILON, Model, size
from belady.planners.tvdnn_solver import Answer, solver

# Part by which a schedule that counts as the fastest may exceed it, to move fewer bytes or so.
TOLERANCE = 2 * EPSILON
# Whole variables above which the solver is not asked: it would only use up its time.
_LARGEST = 20_000


@dataclass(frozen=True, slots=True)
class TvdnnIlp:
    """The swap schedule with the least stall, and of equals that with the fewest bytes moved.

    `belady.planners.tvdnn_model` has the program, a reconstruction (`belady.planners.tvdnn`); it
    is solved by HiGHS. The schedule of `belady.planners.tvdnn_greedy.TvdnnGreedy` is a bound from
    the start, and the plan where the solver finds none that simulates faster. The reasons in the
    plan say which it is and how far from the best it can be. Plans are the same every time if
    the solver ends within its time.

    Attributes
    ----------
    limit_s
        Seconds for the solver.
    """

    name: str = "tvdnn_ilp"
    version: int = 2
    recomputes: bool = False
    limit_s: float = 60.0

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """See `belady.planners.base.Planner`; every plan of this policy is exact.

        Raises
        ------
        MissingExtraError
            If something has to move and SciPy is not installed.
        """
        swapping = Swapping(Case(trace, hardware, budget, exact))
        planner = f"{self.name}/{self.version}"
        # What does not fit when all gaps are used fits in no schedule: that is known from here on.
        quick = schedule(swapping, planner)
        if quick.moves_nothing:
            return quick
        solve = solver()
        choices = size(swapping)
        if choices > _LARGEST:
            return _because(quick, f"heuristic; the program is too large, with {choices} choices")
        model = Model(swapping)
        model.limit_seconds(quick.predicted_seconds * (1 + TOLERANCE))
        answer = solve(model.program, self.limit_s)
        return _judge(model, answer, quick, self.limit_s)


TVDNN_ILP = TvdnnIlp()


def _judge(model: Model, answer: Answer, quick: Plan, limit_s: float) -> Plan:
    """The faster of the program's schedule and the heuristic's, with what is known of it."""
    swapping, made = model.swapping, None
    if answer.solution is not None:
        moves = {
            value: move
            for index, (free, back) in model.schedule(answer.solution).items()
            for value, move in swapping.gaps[index].away(free, back).items()
        }
        made = attempt(swapping.case, swapping.draft(quick.planner, moves, ""))
    if made is None or made.predicted_seconds > quick.predicted_seconds * (1 + TOLERANCE):
        made = None
    best, whose = (quick, "heuristic") if made is None else (made, "integer program")
    if not answer.complete:
        least = max(model.seconds(answer.bound), swapping.keep_seconds)
        gap = max(0.0, best.predicted_seconds / least - 1)
        found = "" if answer.solution is not None else " without a schedule"
        stopped = f"the program was stopped after {limit_s:g} s{found}"
        return _because(best, f"{whose}; {stopped}, no schedule of it is {gap:.2%} faster")
    if made is None and answer.solution is not None:
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
