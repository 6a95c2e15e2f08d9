"""Which convolution algorithms to ask for, where the trace knows alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from belady.ir.plan import Workspace
from belady.ir.trace import Algorithm, Op
from belady.planners.moves import Case


@dataclass(frozen=True, slots=True)
class Algorithms:
    """A phase-wide setting, and the choice for each op that it stands for in simulation."""

    workspace: Workspace = Workspace.UNCHANGED
    by_op: tuple[tuple[int, str], ...] = ()

    @property
    def numerics(self) -> tuple[str, ...]:
        """Names of the settings that can change a bit of the result."""
        if self.workspace is Workspace.UNCHANGED:
            return ()
        return (f"workspace={self.workspace.value}",)


UNCHANGED = Algorithms()


def fastest(case: Case) -> Algorithms:
    """Every op by its fastest algorithm, vDNN's (p)."""
    return _everywhere(case, Workspace.PERFORMANCE)


def leanest(case: Case) -> Algorithms:
    """Every op by the algorithm with least workspace, vDNN's (m)."""
    return _everywhere(case, Workspace.MEMORY)


def fastest_that_fit(case: Case, others: Sequence[int]) -> Algorithms:
    """Every op by the fastest algorithm that leaves its moment within the budget.

    Where none does, by the one with least workspace. As execution knows one setting for the
    whole phase, that is MEMORY: no op then takes more than planned.

    Parameters
    ----------
    others
        Device bytes held during each op by all but workspace.
    """
    if fastest(case) == UNCHANGED:
        return UNCHANGED
    by_op: list[tuple[int, str]] = []
    allocator, limit = case.hardware.allocator, case.budget.device_bytes
    for index, op in enumerate(case.trace.ops):
        if op.algorithms:
            room = (
                algorithm
                for algorithm in op.algorithms
                if allocator.budget_for(others[index] + allocator.held(algorithm.workspace_bytes))
                <= limit
            )
            by_op.append((index, next(room, _least(op)).name))
    return Algorithms(Workspace.MEMORY, tuple(by_op))


def _least(op: Op) -> Algorithm:
    return min(op.algorithms, key=lambda algorithm: algorithm.workspace_bytes)


def _everywhere(case: Case, workspace: Workspace) -> Algorithms:
    ops = [(index, op) for index, op in enumerate(case.trace.ops) if op.algorithms]
    if case.exact or not ops:
        return UNCHANGED
    if workspace is Workspace.MEMORY:
        return Algorithms(workspace, tuple((index, _least(op).name) for index, op in ops))
    return Algorithms(workspace, tuple((index, op.algorithms[0].name) for index, op in ops))
