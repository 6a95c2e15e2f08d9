"""Bytes that ops, replays and encodings take while they run, and give back before the next op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from belady.errors import PlanMismatchError
from belady.ir.codecs import passes
from belady.ir.hardware import Allocator
from belady.ir.ops import Fusion
from belady.ir.plan import Encode, Plan, Recompute
from belady.ir.trace import Trace


def scratch(trace: Trace, plan: Plan, allocator: Allocator) -> list[int]:
    """Bytes of each op beside its values: its workspace, or what is larger just before it.

    Raises
    ------
    PlanMismatchError
        If the plan chooses an algorithm that its op does not have.
    """
    key = scratch, allocator.round_bytes
    if key not in trace.worked_out:
        trace.worked_out[key] = [allocator.held(op.workspace_bytes) for op in trace.ops]
    held: list[int] = trace.worked_out[key].copy()
    for index, nbytes in chosen_workspaces(trace, plan).items():
        held[index] = allocator.held(nbytes)
    for value, decision in plan.decisions.items():
        if isinstance(decision, Recompute):
            # What a replay takes on top is gone before the op at its boundary is issued.
            at = min(decision.at, len(held) - 1)
            held[at] = max(held[at], replay_bytes(trace, value, decision, allocator))
        elif isinstance(decision, Encode) and trace.device != "cpu":
            # On a CPU what the engine itself takes for a moment is no part of the budget.
            nbytes = trace.storages[trace.values[value].storage].nbytes
            taken = allocator.held(passes(decision, nbytes).scratch)
            for at in {min(decision.encode_at, len(held) - 1), decision.decode_at}:
                held[at] = max(held[at], taken)
    return held


def replay_bytes(trace: Trace, index: int, decision: Recompute, allocator: Allocator) -> int:
    """Most bytes that a replay takes while it runs, beside those of the value."""
    key = replay_bytes, index, decision.ops, allocator.round_bytes
    known: int | None = trace.worked_out.get(key)
    if known is not None:
        return known
    most = held = 0
    for step in replay_steps(trace, index, decision, allocator):
        held += sum(nbytes for _, nbytes in step.taken)
        most = max(most, held + step.workspace)
        held -= sum(nbytes for _, nbytes in step.freed)
    trace.worked_out[key] = most
    return most


class ReplayStep(NamedTuple):
    """One op of a replay: what it makes beside the value, with bytes, and what goes after it.

    Attributes
    ----------
    taken, freed
        Storages and their bytes. What nothing later in the replay reads goes at once.
    workspace
        Bytes that the op takes for as long as it runs.
    makes
        How many of ``taken`` come before the bytes of the value itself, as an op makes its results
        one after another; None where it makes none of them.
    """

    taken: list[tuple[int, int]]
    workspace: int
    freed: list[tuple[int, int]]
    makes: int | None


def replay_steps(
    trace: Trace, index: int, decision: Recompute, allocator: Allocator
) -> list[ReplayStep]:
    """What the replay of value ``index`` takes and gives back, op by op."""
    own, made = trace.values[index].storage, dict[int, int]()
    touched: dict[int, list[int]] = {}
    for place, op in enumerate(decision.ops):
        again = trace.replays[op]
        written = {trace.values[value].storage for value in again.writes}
        for storage in sorted(written):
            made.setdefault(storage, place)
        read = {trace.values[value].storage for value in again.reads}
        for storage in made.keys() & (read | written):
            touched.setdefault(storage, []).append(place)
    born = made.pop(own, -1)
    fusions = [trace.ops[op].fusion for op in decision.ops]
    made = {it: at for it, at in made.items() if not _is_inlined(fusions, touched[it])}
    before = sum(place == born and storage < own for storage, place in made.items())
    steps = [
        ReplayStep(
            [], allocator.held(trace.ops[op].workspace_bytes), [], before if place == born else None
        )
        for place, op in enumerate(decision.ops)
    ]
    for storage, place in made.items():
        block = storage, allocator.held(trace.storages[storage].nbytes)
        steps[place].taken.append(block)
        steps[touched[storage][-1]].freed.append(block)
    return steps


def _is_inlined(fusions: Sequence[Fusion], touched: Sequence[int]) -> bool:
    """Whether a compiler writes a storage nowhere: one op reads it, in the kernel that makes it.

    Parameters
    ----------
    fusions
        Of the ops of a replay.
    touched
        Which of them make it, read it or write to it, in order.
    """
    makes, *others = touched
    between = fusions[makes + 1 : touched[-1] + 1]
    return (
        len(others) == 1
        and fusions[makes] is not Fusion.NONE
        and all(fusion is Fusion.AROUND for fusion in between)
    )


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
