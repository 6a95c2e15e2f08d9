"""Which convolution algorithms to ask for, where the trace knows alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from belady.ir.plan import Workspace
from belady.ir.trace import Algorithm, Op, Trace
from belady.planners.moves import Case


@dataclass(frozen=True, slots=True)
class Algorithms:
    """A phase-wide setting, and the choice for each op that it stands for in simulation."""

    workspace: Workspace = Workspace.UNCHANGED
    by_op: tuple[tuple[int, str], ...] = ()

    @property
    def numerics(self) -> tuple[str, ...]:
        """Names of the settings that can change a bit of the result."""
        # What performs best is what cuDNN chooses by itself.
        return ("workspace=memory",) if self.workspace is Workspace.MEMORY else ()


UNCHANGED = Algorithms()


def fastest(case: Case) -> Algorithms:
    """Every op as it was observed, vDNN's (p): what cuDNN names first, whatever it takes."""
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


def leaner(trace: Trace) -> tuple[Trace, Algorithms]:
    """The trace of the same iteration with the algorithms that have least workspace, and these.

    No convolution is replayable in it: a replay runs on the thread of backward, where cuDNN may
    have chosen otherwise, and the setting is for those without a choice too.
    """
    algorithms = _chosen(trace, Workspace.MEMORY)
    ops = [replace(op, replayable=op.replayable and not _convolves(op)) for op in trace.ops]
    for index, _ in algorithms.by_op:
        least = _least(ops[index])
        ops[index] = replace(
            ops[index],
            device_seconds=least.device_seconds,
            workspace_bytes=least.workspace_bytes,
            algorithms=(),
            shortcut=None,
        )
    return replace(trace, ops=tuple(ops)), algorithms


def _convolves(op: Op) -> bool:
    return "convolution" in op.name


def _least(op: Op) -> Algorithm:
    return min(op.algorithms, key=lambda algorithm: algorithm.workspace_bytes)


def _observed(op: Op) -> Algorithm:
    taken = (it for it in op.algorithms if it.workspace_bytes == op.workspace_bytes)
    return next(taken, op.algorithms[0])


def _everywhere(case: Case, workspace: Workspace) -> Algorithms:
    return UNCHANGED if case.exact else _chosen(case.trace, workspace)


def _chosen(trace: Trace, workspace: Workspace) -> Algorithms:
    rule = _least if workspace is Workspace.MEMORY else _observed
    by_op = tuple((i, rule(op).name) for i, op in enumerate(trace.ops) if op.algorithms)
    return Algorithms(workspace, by_op) if by_op else UNCHANGED
