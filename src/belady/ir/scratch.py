"""Bytes that ops, replays and encodings take while they run, and give back before the next op."""

from __future__ import annotations

from belady.errors import PlanMismatchError
from belady.ir.codecs import passes
from belady.ir.hardware import Allocator
from belady.ir.plan import Encode, Plan, Recompute
from belady.ir.trace import Trace


def scratch(trace: Trace, plan: Plan, allocator: Allocator) -> list[int]:
    """Bytes of each op beside its values: its workspace, or what is larger just before it.

    Raises
    ------
    PlanMismatchError
        If the plan chooses an algorithm that its op does not have.
    """
    held = [allocator.held(op.workspace_bytes) for op in trace.ops]
    for index, nbytes in chosen_workspaces(trace, plan).items():
        held[index] = allocator.held(nbytes)
    for value, decision in plan.decisions.items():
        if isinstance(decision, Recompute):
            # What a replay takes on top is gone before the op at its boundary is issued.
            at = min(decision.at, len(held) - 1)
            held[at] = max(held[at], _replay_bytes(trace, value, decision, allocator))
        elif isinstance(decision, Encode) and trace.device != "cpu":
            # On a CPU what the engine itself takes for a moment is no part of the budget.
            nbytes = trace.storages[trace.values[value].storage].nbytes
            taken = allocator.held(passes(decision, nbytes).scratch)
            for at in {min(decision.encode_at, len(held) - 1), decision.decode_at}:
                held[at] = max(held[at], taken)
    return held


def _replay_bytes(trace: Trace, index: int, decision: Recompute, allocator: Allocator) -> int:
    """Bytes that a replay takes while it runs, beside those of the value: outputs and workspace."""
    ops = [trace.ops[op] for op in decision.ops]
    written = {trace.values[output].storage for op in ops for output in op.replay.writes}
    written.discard(trace.values[index].storage)
    outputs = sum(allocator.held(trace.storages[storage].nbytes) for storage in written)
    return outputs + max((allocator.held(op.workspace_bytes) for op in ops), default=0)


def chosen_workspaces(trace: Trace, plan: Plan) -> dict[int, int]:
    """Scratch bytes of the ops whose algorithm the plan chooses."""
    chosen: dict[int, int] = {}
    for index, name in plan.layer_algorithms:
        known = trace.ops[index].algorithms if 0 <= index < len(trace.ops) else ()
        found = [algorithm.workspace_bytes for algorithm in known if algorithm.name == name]
        if not found:
            raise PlanMismatchError(f"op {index} has no algorithm {name!r}")
        chosen[index] = found[0]
    return chosen
