"""Which convolution algorithms to ask for, where the trace knows alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from belady.ir.plan import Plan, Workspace
from belady.ir.trace import Algorithm, Op, Trace
from belady.planners.moves import Case

# Names of what an op runs when it is left alone, and of what it runs under `Workspace.MEMORY`.
USUAL, LEAN = "usual", "lean"


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
    """Every op by the algorithm that `Workspace.MEMORY` makes it run, vDNN's (m)."""
    return _everywhere(case, Workspace.MEMORY)


def fastest_that_fit(case: Case, others: Sequence[int]) -> Algorithms:
    """Every op by the fastest algorithm that leaves its moment within the budget.

    Where none does, by the leanest. As execution knows one setting for the whole phase, that is
    MEMORY: no op then takes more than planned, so none is planned with less than it then takes.

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
            least = _leanest(op)
            room = (
                algorithm
                for algorithm in op.algorithms
                if algorithm.workspace_bytes >= least.workspace_bytes
                and allocator.budget_for(others[index] + allocator.held(algorithm.workspace_bytes))
                <= limit
            )
            by_op.append((index, next(room, least).name))
    return Algorithms(Workspace.MEMORY, tuple(by_op))


def leaner(trace: Trace) -> tuple[Trace, Algorithms]:
    """The trace of the same iteration with the algorithms that MEMORY makes it run, and these.

    No convolution is replayable in it: a replay runs on the thread of backward, where cuDNN may
    have chosen otherwise, and the setting is for those without a choice too.
    """
    algorithms = _chosen(trace, Workspace.MEMORY)
    ops = list(convolving_once(trace).ops)
    for index, _ in algorithms.by_op:
        least = _leanest(ops[index])
        ops[index] = replace(
            ops[index],
            device_seconds=least.device_seconds,
            workspace_bytes=least.workspace_bytes,
            algorithms=(),
            shortcut=None,
        )
    return replace(trace, ops=tuple(ops)), algorithms


def convolving_once(trace: Trace) -> Trace:
    """The trace of the same iteration, in which no convolution may be computed again."""
    ops = (replace(op, replayable=op.replayable and not convolves(op)) for op in trace.ops)
    return replace(trace, ops=tuple(ops))


def as_run(plan: Plan, trace: Trace) -> Plan:
    """The plan with the algorithms that its iterations run, where ``trace`` knows them.

    That is one setting for all, whatever a policy took single ops for.
    """
    if plan.workspace is not Workspace.MEMORY:
        return plan
    named = dict(plan.layer_algorithms)
    named |= {i: LEAN for i, op in enumerate(trace.ops) if _named(op, LEAN) is not None}
    return replace(plan, layer_algorithms=tuple(sorted(named.items())))


def convolves(op: Op) -> bool:
    """Whether the setting can change what the op runs."""
    return "convolution" in op.name


def _named(op: Op, name: str) -> Algorithm | None:
    return next((it for it in op.algorithms if it.name == name), None)


def _leanest(op: Op) -> Algorithm:
    # One that was seen to run under the setting can take more than the usual one.
    return _named(op, LEAN) or min(op.algorithms, key=lambda it: it.workspace_bytes)


def _observed(op: Op) -> Algorithm:
    taken = (it for it in op.algorithms if it.workspace_bytes == op.workspace_bytes)
    return _named(op, USUAL) or next(taken, op.algorithms[0])


def _everywhere(case: Case, workspace: Workspace) -> Algorithms:
    return UNCHANGED if case.exact else _chosen(case.trace, workspace)


def _chosen(trace: Trace, workspace: Workspace) -> Algorithms:
    rule = _leanest if workspace is Workspace.MEMORY else _observed
    by_op = tuple((i, rule(op).name) for i, op in enumerate(trace.ops) if op.algorithms)
    return Algorithms(workspace, by_op) if by_op else UNCHANGED


def with_workspaces(trace: Trace, share: float) -> Trace:
    """The trace with what its convolutions may ask for beside their operands, where none is known.

    A library that does not get the workspace of its fastest algorithm takes another one, which can
    be tens of times slower, and stays with it.

    Parameters
    ----------
    share
        Bytes of workspace, of those of input, weight and output.
    """

    def asks(op: Op) -> int:
        if op.workspace_bytes or "convolution" not in op.name:
            return op.workspace_bytes
        # Backward reads all three, as values or gradients; what it writes is as large as some.
        shown = op.reads if "backward" in op.name else (*op.reads, *op.writes)
        storages = {trace.values[value].storage for value in shown}
        return int(share * sum(trace.storages[it].nbytes for it in storages))

    return replace(trace, ops=tuple(replace(op, workspace_bytes=asks(op)) for op in trace.ops))
