"""What a replay holds while it runs: op by op, no more than what is still to be read."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

import pytest

from belady.ir.hardware import Allocator
from belady.ir.ops import Fusion
from belady.ir.plan import Assignment, Budget, Plan, Recompute
from belady.ir.replay import at_once
from belady.ir.scratch import replay_bytes, replay_steps, scratch, steps_of
from belady.ir.trace import Trace
from belady.simulate import simulate
from tests.support.builder import OpSpec, build_trace
from tests.unit.ir.moments import GPU

EXACT = Allocator(1, 0.0, 0)


def line(*nbytes: int, workspace: int = 0, in_place: int = -1) -> Trace:
    """Ops that each read what the one before wrote, with results of these bytes."""
    return build_trace(
        [
            OpSpec(
                nbytes=size,
                workspace_bytes=workspace,
                saves_input=False,
                saves_output=op + 1 != in_place,
                in_place=op == in_place,
                replayable=True,
            )
            for op, size in enumerate(nbytes)
        ]
    )


def written(trace: Trace, op: int) -> int:
    (value,) = trace.ops[op].writes
    return value


def of_ops(trace: Trace, *ops: int) -> tuple[int, Recompute]:
    value = written(trace, ops[-1])
    return value, Recompute(ops, trace.values[value].first_read or 0)


def test_what_was_read_for_the_last_time_goes_before_the_next_op() -> None:
    trace = line(5, 10, 20, 40, 80)
    value, replay = of_ops(trace, 1, 2, 3, 4)
    steps = replay_steps(trace, value, replay, EXACT)
    assert [[n for _, n in step.taken] for step in steps] == [[10], [20], [40], []]
    assert [[n for _, n in step.freed] for step in steps] == [[], [10], [20], [40]]
    # Never more than two at once, and the value itself counts where it is held.
    assert replay_bytes(trace, value, replay, EXACT) == 20 + 40


def test_workspaces_count_beside_what_is_held_then() -> None:
    trace = line(5, 10, 20, 40, 80, workspace=7)
    assert replay_bytes(trace, *of_ops(trace, 1, 2, 3, 4), EXACT) == 20 + 40 + 7


def test_what_nobody_reads_goes_after_its_op() -> None:
    trace = line(5, 10, 20, 40)
    value, replay = of_ops(trace, 1, 2, 3)
    # Op 2 starts from what was kept instead.
    ops = list(trace.ops)
    ops[2] = replace(ops[2], reads=(written(trace, 0),))
    steps = replay_steps(replace(trace, ops=tuple(ops)), value, replay, EXACT)
    assert [[n for _, n in step.freed] for step in steps] == [[10], [], [20]]


def test_bytes_that_are_overwritten_are_held_until_the_last_of_their_contents_is_read() -> None:
    trace = line(5, 10, 10, 40, in_place=2)
    assert trace.values[written(trace, 1)].storage == trace.values[written(trace, 2)].storage
    value, replay = of_ops(trace, 1, 2, 3)
    steps = replay_steps(trace, value, replay, EXACT)
    assert [[n for _, n in step.taken] for step in steps] == [[10], [], []]
    assert [[n for _, n in step.freed] for step in steps] == [[], [], [10]]


def fused(trace: Trace, *fusions: Fusion) -> Trace:
    ops = [replace(op, fusion=it) for op, it in zip(trace.ops, fusions, strict=False)]
    return replace(trace, ops=(*ops, *trace.ops[len(ops) :]))


AFTER, AROUND, NONE = Fusion.AFTER, Fusion.AROUND, Fusion.NONE


@pytest.mark.parametrize(
    ("fusions", "taken", "most"),
    [
        ((NONE, NONE, AFTER, AROUND, AROUND), [[10], [], [], []], 10),
        # What a library makes, or reads, is written; so is what a norm reads, twice.
        ((AROUND, NONE, AROUND, NONE, AROUND), [[10], [20], [40], []], 60),
        ((AROUND, AROUND, AFTER, AFTER, AROUND), [[10], [20], [], []], 30),
    ],
)
def test_what_one_kernel_hands_on_is_written_nowhere(
    fusions: tuple[Fusion, ...], taken: list[list[int]], most: int
) -> None:
    trace = fused(line(5, 10, 20, 40, 80), *fusions)
    value, replay = of_ops(trace, 1, 2, 3, 4)
    steps = replay_steps(trace, value, replay, EXACT)
    assert [[n for _, n in step.taken] for step in steps] == taken
    freed = {block for step in steps for block in step.freed}
    assert freed == {block for step in steps for block in step.taken}
    assert replay_bytes(trace, value, replay, EXACT) == most


def test_what_two_ops_read_is_written() -> None:
    trace = fused(line(5, 10, 20, 40), NONE, AROUND, AROUND, AROUND)
    value, replay = of_ops(trace, 1, 2, 3)
    both = written(trace, 1), written(trace, 2)
    ops = [*trace.ops[:3], replace(trace.ops[3], reads=both), *trace.ops[4:]]
    steps = replay_steps(replace(trace, ops=tuple(ops)), value, replay, EXACT)
    assert [[n for _, n in step.taken] for step in steps] == [[10], [], []]


@pytest.mark.parametrize(
    ("every_boundary", "taken", "freed"),
    [
        # Alone each makes what it starts from, and gives it back.
        (False, [[[10], []], [[10], []]], [[[], [10]], [[], [10]]]),
        (True, [[[10], []], [[]]], [[[], []], [[10]]]),
    ],
)
def test_in_a_graph_what_one_replay_makes_stays_for_the_next_at_its_boundary(
    every_boundary: bool, taken: list[list[list[int]]], freed: list[list[list[int]]]
) -> None:
    alike = OpSpec(saves_input=False, replayable=True)
    specs = [
        replace(alike, nbytes=5, saves_output=True),
        replace(alike, nbytes=10),
        replace(alike, nbytes=20, saves_output=True),
        replace(alike, nbytes=40, saves_output=True),
    ]
    trace = build_trace(specs, every_boundary=every_boundary)
    ops = [*trace.ops[:3], replace(trace.ops[3], reads=(written(trace, 1),)), *trace.ops[4:]]
    trace = replace(trace, ops=tuple(ops))
    # Backward reads the last one first.
    at = trace.values[written(trace, 3)].first_read or 0
    replays = {written(trace, 3): Recompute((1, 3), at), written(trace, 2): Recompute((1, 2), at)}
    groups = at_once(trace, replays)
    assert [[value for value, _ in it] for it in groups] == (
        [[*replays][::-1]] if every_boundary else [[it] for it in replays]
    )
    steps = [it for group in groups for it in steps_of(trace, group, EXACT)]
    assert [[[n for _, n in step.taken] for step in it] for it in steps] == taken
    assert [[[n for _, n in step.freed] for step in it] for it in steps] == freed
    assert [[len(step.values) for step in it] for it in steps] == [[0, 1], [0, 1][-len(taken[1]) :]]
    plan = Plan(trace.fingerprint, "made", Budget(100), tuple(starmap(Assignment, replays.items())))
    assert scratch(trace, plan, EXACT)[at] == 10
    run = [trace.replays[op].device_seconds for op in ((1, 2, 3) if every_boundary else (1, 2) * 2)]
    assert simulate(trace, GPU, plan).replay_seconds == pytest.approx(sum(run))


def test_a_value_that_another_replay_has_made_takes_no_op_of_its_own() -> None:
    trace = build_trace([OpSpec(saves_output=True, replayable=True)] * 3, every_boundary=True)
    both = tuple(written(trace, op) for op in (0, 1))
    ops = (replace(trace.ops[0], writes=()), replace(trace.ops[1], writes=both), *trace.ops[2:])
    trace = replace(trace, ops=ops)
    found = steps_of(trace, [(value, Recompute((1,), 3)) for value in both], EXACT)
    assert [len(it) for it in found] == [1, 0]
    assert [it for it, _ in found[0][0].taken] == []
    assert [storage for _, storage in found[0][0].values] == [
        trace.values[value].storage for value in both
    ]
