"""What every planner is, and how its choices become a judged Plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from belady.ir.hardware import HardwareProfile
from belady.ir.legality import check, require
from belady.ir.plan import Assignment, Budget, Encode, Keep, Managed, Offload, Plan, Recompute
from belady.ir.trace import Trace
from belady.planners.moves import Case, read_by
from belady.planners.traits import Traits
from belady.planners.workspace import UNCHANGED, Algorithms
from belady.simulate.engine import simulate


class Planner(Protocol):
    """A policy: the same question always gets the same plan."""

    @property
    def name(self) -> str:
        """What a user calls it, e.g. ``"vdnn_all"``."""
        ...

    @property
    def version(self) -> int:
        """Number raised whenever its rules change."""
        ...

    @property
    def traits(self) -> Traits:
        """What engines do for it."""
        ...

    def __call__(
        self, trace: Trace, hardware: HardwareProfile, budget: Budget, *, exact: bool = False
    ) -> Plan:
        """Plan ``trace`` on ``hardware`` within ``budget``.

        Parameters
        ----------
        exact
            Forbid every setting that can change a bit of the result.

        Raises
        ------
        InfeasibleBudgetError
            If no plan of this policy fits; it names the smallest budget that does.
        """
        ...


@dataclass(frozen=True, slots=True)
class Draft:
    """Choices of a policy, before they are judged.

    Attributes
    ----------
    planner
        Name and version, e.g. ``"vdnn_all/1"``.
    kept
        Why a value stays that the policy could have moved and did not want to.
    reasons
        For each value that the policy wants to move: why.
    moves
        The moves for which there is room.
    replays
        Values that are run again instead.
    managed
        Values that are moved in managed memory instead.
    encoded
        Values that stay in fewer bytes instead.
    dust
        Values that are too small to be wanted.
    """

    planner: str
    kept: str
    reasons: Mapping[int, str] = field(default_factory=dict)
    moves: Mapping[int, Offload] = field(default_factory=dict)
    replays: Mapping[int, Recompute] = field(default_factory=dict)
    algorithms: Algorithms = UNCHANGED
    managed: Mapping[int, Managed] = field(default_factory=dict)
    encoded: Mapping[int, Encode] = field(default_factory=dict)
    dust: Collection[int] = ()


def assemble(case: Case, draft: Draft) -> Plan:
    """Write the plan down: every saved value has a decision and a reason.

    Values stand in the order in which backward reads them: copies that are due at one boundary
    are issued in the order of the plan.
    """
    trace = case.trace
    order = sorted(trace.saved, key=lambda index: (read_by(trace.values[index]), index))
    could = case.movable if draft.reasons else frozenset(trace.saved)
    return Plan(
        trace=case.trace.fingerprint,
        planner=draft.planner,
        budget=case.budget,
        assignments=tuple(_assignment(draft, index, could) for index in order),
        workspace=draft.algorithms.workspace,
        layer_algorithms=draft.algorithms.by_op,
        numerics=draft.algorithms.numerics,
    )


def fits(case: Case, draft: Draft) -> bool:
    """Whether the draft is legal and within the budget."""
    return check(case.trace, case.hardware, assemble(case, draft), case.budget).ok


def attempt(case: Case, draft: Draft) -> Plan | None:
    """Plan with its peak and seconds predicted, or None if the draft may not run."""
    plan = assemble(case, draft)
    verdict = check(case.trace, case.hardware, plan, case.budget)
    if not verdict.ok:
        return None
    seconds = simulate(case.trace, case.hardware, plan).seconds
    return replace(plan, predicted_peak_bytes=verdict.peak_bytes, predicted_seconds=seconds)


def finish(case: Case, draft: Draft) -> Plan:
    """Like `attempt` for the last resort of a policy: what it does with the least memory.

    Raises
    ------
    InfeasibleBudgetError
        If the device peak does not fit the budget; that peak makes the smallest feasible budget.
    """
    made = attempt(case, draft)
    if made is None:
        made = assemble(case, draft)
        verdict = check(case.trace, case.hardware, made, case.budget)
        require(case.trace, case.hardware, made, verdict.needed_bytes)
    return made


def _assignment(draft: Draft, index: int, could: frozenset[int]) -> Assignment:
    moved = draft.moves.get(index) or draft.managed.get(index)
    decision = moved or draft.replays.get(index) or draft.encoded.get(index)
    if decision is not None:
        return Assignment(index, decision, draft.reasons[index])
    if index not in could or index in draft.dust:
        return Assignment(index, Keep(), "kept: too little to gain from moving it")
    if index in draft.reasons:
        return Assignment(
            index, Keep(), "kept: no other tier has room for it, or it would be back at once"
        )
    return Assignment(index, Keep(), draft.kept)
