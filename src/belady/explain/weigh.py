"""Every choice for some values, simulated and judged with all other decisions as planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import inf

from belady.errors import PlanMismatchError
from belady.explain import choices
from belady.explain.document import Choice, Outcome, Weighed
from belady.ir.legality import Problem, check
from belady.ir.margin import needed
from belady.ir.plan import Decision, Encode, Managed, Offload, Recompute
from belady.ir.residency import away
from belady.ir.run import Run
from belady.ir.timeline import Cause, Timeline
from belady.ir.trace import Tier
from belady.planners.moves import Case
from belady.planners.spread import boundary_times
from belady.report.facts import decision_name, short_name
from belady.simulate import simulate
from belady.units import format_bytes

# Share of the iteration below which two predictions differ by rounding alone.
_ROUNDING = 1e-9


class Scales:
    """One run, simulated as planned, and what else it could be.

    Attributes
    ----------
    planned
        Prediction for the plan as it is.
    problems
        Why the plan as it is may not run within its budget.
    times
        Seconds at which compute is expected to reach each boundary as planned.

    Raises
    ------
    PlanMismatchError
        If more is wrong with the plan than the bytes that it needs.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        verdict = check(run.trace, run.hardware, run.plan, run.plan.budget)
        broken = [problem.message for problem in verdict.problems if _is_structural(problem)]
        if broken:
            raise PlanMismatchError("; ".join(broken))
        self.problems = tuple(problem.message for problem in verdict.problems)
        self._timeline = simulate(run.trace, run.hardware, run.plan)
        self.planned = self._outcome(self._timeline)
        self.times = boundary_times(run.trace, self._timeline)
        self._case = Case(run.trace, run.hardware, run.plan.budget)

    def weigh(self, values: tuple[int, ...]) -> Weighed | None:
        """Compare what is planned for ``values`` with all else that could be done with them.

        Returns
        -------
        Weighed or None
            None where none of them has a choice.
        """
        plan = self.run.plan
        group = choices.together(self.run.trace, plan, values)
        if not group:
            return None
        names = {decision_name(plan, value) for value in group}
        decision = names.pop() if len(names) == 1 else ""
        kept = None if decision == "keep" else self._try("keep", choices.keep(group))
        least = self.planned if kept is None else kept.outcome or self.planned
        found = [kept] if kept is not None else []
        for tier in choices.tiers(self.run.hardware):
            found += self._offload(group, tier, decision, least.seconds)
        found += self._recompute(group, decision)
        found += self._encode(group)
        return Weighed(
            values=group,
            decision=decision,
            stall_seconds=self._stalled(group),
            cost_seconds=self._change(self.planned.seconds, least.seconds),
            keep_bytes=least.needed_bytes,
            choices=tuple(found),
            next_best=_next_best(found),
        )

    def _offload(
        self, group: tuple[int, ...], tier: Tier, decision: str, least: float
    ) -> Iterator[Choice]:
        """The faster of two placements, gone for as long or as short as can be.

        Copies to the tier where the values go anyway are a choice only if they beat the plan's.
        """
        name = f"offload to {tier}"
        waits = self.planned.seconds > least * (1 + _ROUNDING)
        if name == decision and not waits and not self.problems:
            return  # no other time for the copies is better
        floor = choices.offloaded(self._case, self.run.plan, group, tier)
        if not floor:
            yield Choice(name, 0, "", None, problems=("its bytes would not leave for a single op",))
            return
        wider = choices.spread(self._case, self.run.plan, floor, self.times)
        tried: list[Choice] = []
        for placed in (wider, floor) if wider != floor else (floor,):
            if not self._is_planned(placed):
                tried.append(self._try(name, placed))
                # A copy for which nothing waits cannot be placed better.
                if tried[-1].legal and _rank(tried[-1])[1] <= least * (1 + _ROUNDING):
                    break
        best = min(tried, key=_rank, default=None)
        if best is not None and (name != decision or self._beats_the_plan(best)):
            yield best

    def _recompute(self, group: tuple[int, ...], decision: str) -> Iterator[Choice]:
        """The cheapest replays; other ones than the plan's are a choice only if they beat them."""
        trace, plan = self.run.trace, self.run.plan
        replays = choices.recomputed(trace, plan, group)
        if replays:
            if not self._is_planned(replays):
                again = self._try("recompute", replays)
                if decision != again.name or self._beats_the_plan(again):
                    yield again
        elif not all(isinstance(plan.decisions.get(value), Recompute) for value in group):
            why = choices.why_no_replay(trace, plan, group[0])
            many = "none of them can be; the first: " if len(group) > 1 else ""
            yield Choice("recompute", 0, "", None, problems=(f"{many}{why}",))

    def _encode(self, group: tuple[int, ...]) -> Iterator[Choice]:
        """All of them in fewer bytes, where that can be and is not the plan."""
        encodings = choices.encoded(self._case, group)
        if encodings and not self._is_planned(encodings):
            names = sorted({it.codec for it in encodings.values()})
            yield self._try(f"encode ({', '.join(names)})", dict(encodings))

    def _try(self, name: str, changes: Mapping[int, Decision]) -> Choice:
        run = self.run
        plan = choices.changed(run.plan, changes)
        problems = check(run.trace, run.hardware, plan, plan.budget).problems
        words = tuple(problem.message for problem in problems)
        detail = self._detail(changes)
        if any(map(_is_structural, problems)):
            return Choice(name, len(changes), detail, None, problems=words)
        outcome = self._outcome(simulate(run.trace, run.hardware, plan))
        return Choice(
            name,
            len(changes),
            detail,
            outcome,
            self._change(outcome.seconds, self.planned.seconds),
            outcome.peak_bytes - self.planned.peak_bytes,
            words,
        )

    def _beats_the_plan(self, choice: Choice) -> bool:
        return choice.legal and (bool(self.problems) or choice.seconds_change < 0)

    def _is_planned(self, changes: Mapping[int, Decision]) -> bool:
        return all(self.run.plan.decisions.get(v) == it for v, it in changes.items())

    def _detail(self, changes: Mapping[int, Decision]) -> str:
        if len(changes) > 1:
            return ""
        return next(self._how(value, decision) for value, decision in changes.items())

    def _how(self, value: int, decision: Decision) -> str:
        trace = self.run.trace
        if isinstance(decision, (Offload, Managed)):
            gone, back = away(trace, value, decision)
            return f"gone from op {gone} until op {back}"
        if isinstance(decision, Recompute):
            names = ", ".join(short_name(trace.ops[op].name) for op in decision.ops)
            return f"at op {decision.at} by running again: {names}"
        if isinstance(decision, Encode):
            return f"in {format_bytes(decision.nbytes)} until op {decision.decode_at}"
        return ""

    def _change(self, seconds: float, before: float) -> float:
        change = seconds - before
        return change if abs(change) > _ROUNDING * self.planned.seconds else 0.0

    def _stalled(self, group: tuple[int, ...]) -> float:
        return sum(
            (
                stall.seconds
                for stall in self._timeline.stalls
                if stall.cause is not Cause.HOST and stall.value in group
            ),
            0.0,
        )

    def _outcome(self, timeline: Timeline) -> Outcome:
        peak = timeline.peak(Tier.DEVICE)
        return Outcome(
            seconds=timeline.seconds,
            stall_seconds=timeline.stall_seconds,
            replay_seconds=timeline.replay_seconds,
            peak_bytes=peak,
            needed_bytes=needed(self.run.trace, self.run.hardware.allocator, timeline.curve)[0],
        )


def _is_structural(problem: Problem) -> bool:
    """Whether more is wrong than too many bytes in a tier."""
    return problem.nbytes < 0


def _rank(choice: Choice) -> tuple[bool, float, int]:
    if choice.outcome is None:
        return True, inf, 0
    return not choice.legal, choice.outcome.seconds, choice.outcome.peak_bytes


def _next_best(found: list[Choice]) -> int:
    """Index of the fastest legal choice, -1 if none is legal."""
    legal = [index for index, choice in enumerate(found) if choice.legal]
    return min(legal, key=lambda index: _rank(found[index]), default=-1)
