"""Bytes that ops, replays and encodings take while they run, and give back before the next op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from belady.errors import PlanMismatchError
from belady.ir.codecs import passes
from belady.ir.hardware import Allocator
from belady.ir.ops import Fusion
from belady.ir.plan import Encode, Plan, Recompute
from belady.ir.replay import at_once, run_by
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
    for replays in at_once(trace, plan.decisions):
        # What replays take on top is gone before the op at their boundary is issued.
        at = min(replays[0][1].at, len(held) - 1)
        held[at] = max(held[at], _bytes_of(trace, replays, allocator))
    for value, decision in plan.decisions.items():
        if isinstance(decision, Encode) and trace.device != "cpu":
            # On a CPU what the engine itself takes for a moment is no part of the budget.
            nbytes = trace.storages[trace.values[value].storage].nbytes
            taken = allocator.held(passes(decision, nbytes).scratch)
            for at in {min(decision.encode_at, len(held) - 1), decision.decode_at}:
                held[at] = max(held[at], taken)
    return held


def replay_bytes(trace: Trace, index: int, decision: Recompute, allocator: Allocator) -> int:
    """Most bytes that a replay takes while it runs, beside those of the value."""
    return _bytes_of(trace, [(index, decision)], allocator)


def _bytes_of(trace: Trace, replays: Sequence[tuple[int, Recompute]], allocator: Allocator) -> int:
    """Most bytes that replays at one boundary take, beside those of their values."""
    key = _bytes_of, *((index, it.ops) for index, it in replays), allocator.round_bytes
    known: int | None = trace.worked_out.get(key)
    if known is not None:
        return known
    most = held = 0
    for steps in steps_of(trace, replays, allocator):
        for step in steps:
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
        Storages and their bytes. What nothing later reads goes at once.
    workspace
        Bytes that the op takes for as long as it runs.
    values
        Storages of values that it makes, and how many of ``taken`` come before each, as an op makes
        its results one after another.
    """

    taken: list[tuple[int, int]]
    workspace: int
    freed: list[tuple[int, int]]
    values: list[tuple[int, int]]


def replay_steps(
    trace: Trace, index: int, decision: Recompute, allocator: Allocator
) -> list[ReplayStep]:
    """What the replay of value ``index`` takes and gives back by itself, op by op."""
    (steps,) = steps_of(trace, [(index, decision)], allocator)
    return steps


def steps_of(
    trace: Trace, replays: Sequence[tuple[int, Recompute]], allocator: Allocator
) -> list[list[ReplayStep]]:
    """What each of the replays at one boundary takes and gives back, op by op, in their order."""
    ran = set[int]()
    runs = [run_by(trace, decision, ran) for _, decision in replays]
    ops = [op for run in runs for op in run]
    own = {trace.values[index].storage for index, _ in replays}
    made, touched = dict[int, int](), dict[int, list[int]]()
    for place, op in enumerate(ops):
        again = trace.replays[op]
        written = {trace.values[value].storage for value in again.writes}
        for storage in sorted(written):
            made.setdefault(storage, place)
        read = {trace.values[value].storage for value in again.reads}
        for storage in made.keys() & (read | written):
            touched.setdefault(storage, []).append(place)
    fusions = [trace.ops[op].fusion for op in ops]
    beside = {
        storage: place
        for storage, place in made.items()
        if storage not in own and not _is_inlined(fusions, touched[storage])
    }
    steps = [ReplayStep([], allocator.held(trace.ops[op].workspace_bytes), [], []) for op in ops]
    for storage, place in beside.items():
        block = storage, allocator.held(trace.storages[storage].nbytes)
        steps[place].taken.append(block)
        steps[touched[storage][-1]].freed.append(block)
    for storage in sorted(own & made.keys()):
        step = steps[made[storage]]
        step.values.append((sum(it < storage for it, _ in step.taken), storage))
    left = iter(steps)
    return [[next(left) for _ in run] for run in runs]


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
