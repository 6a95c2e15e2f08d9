"""Replays in simulation, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.hardware import Allocator, Link
from belady.ir.legality import check
from belady.ir.plan import Budget, Keep, Offload, Recompute
from belady.ir.replay import COMPARED_ONE_IN
from belady.ir.timeline import Cause, Lane, Span, Stall, Timeline
from belady.ir.trace import Replay, Source, Tier, Trace
from belady.simulate import bound, simulate
from tests.unit.simulate.cases import cpu, gpu, plan_of, trace_of

# The third value is made by op 2 from the first; both are saved, and read in the other order.
SECONDS = (1, 1, 2, 1, 1, 1)
VALUES = ((3, 0, 5), (1, 1, 2), (4, 2, 4))


def trace(*, device: str = "cuda", host_s: float = 0.0, workspace: int = 0) -> Trace:
    made = trace_of(SECONDS, VALUES, device=device, host_s=host_s)
    ops = list(made.ops)
    for index in range(3):
        ops[index] = replace(ops[index], writes=(index,))
    ops[2] = replace(ops[2], reads=(0,), replayable=True, workspace_bytes=workspace)
    return replace(made, ops=tuple(ops))


AGAIN = Recompute((2,), 4)


def spans(timeline: Timeline, lane: Lane) -> list[Span]:
    return [span for span in timeline.spans if span.lane is lane]


def test_a_replay_runs_before_the_op_that_reads() -> None:
    it = trace()
    plan = plan_of(it, Keep(), Keep(), AGAIN)
    assert check(it, gpu(), plan, plan.budget).ok
    timeline = simulate(it, gpu(), plan)
    assert spans(timeline, Lane.COMPUTE)[4:6] == [
        Span(Lane.COMPUTE, 5, 7, 4, 2),
        Span(Lane.COMPUTE, 7, 8, 4),
    ]
    assert (timeline.seconds, timeline.compute_seconds, timeline.replay_seconds) == (9, 7, 2)
    assert not timeline.stalls
    assert not timeline.moved


def test_the_host_issues_it() -> None:
    it = trace(host_s=3)
    timeline = simulate(it, gpu(), plan_of(it, Keep(), Keep(), AGAIN))
    assert spans(timeline, Lane.HOST)[4:6] == [
        Span(Lane.HOST, 12, 15, 4, 2),
        Span(Lane.HOST, 15, 18, 4),
    ]
    assert spans(timeline, Lane.COMPUTE)[4] == Span(Lane.COMPUTE, 15, 17, 4, 2)
    assert timeline.seconds == 22


def test_on_a_cpu_the_host_waits_for_it() -> None:
    it = trace(device="cpu", host_s=1)
    timeline = simulate(it, cpu(), plan_of(it, Keep(), Keep(), AGAIN))
    assert timeline.seconds == 7 + 6 + 2 + 1
    assert sum(stall.seconds for stall in timeline.stalls) == 7


@pytest.mark.parametrize("ready", [4, 5])
def test_a_replay_waits_for_an_input_that_is_on_its_way(ready: int) -> None:
    it = trace()
    plan = plan_of(it, Offload(Tier.HOST, 0, 3, 4, ready), Keep(), AGAIN)
    assert check(it, gpu(), plan, plan.budget).ok
    timeline = simulate(it, gpu(), plan)
    # Out from 1 to 4, in from 5 to 8: the replay waits though op 5 alone would read the value.
    assert timeline.stalls == (Stall(Cause.COPY_IN, 4, 0, 3, 5),)
    assert spans(timeline, Lane.COMPUTE)[4] == Span(Lane.COMPUTE, 8, 10, 4, 2)
    assert timeline.seconds == 12


def test_two_replays_at_one_boundary_run_one_after_the_other() -> None:
    it = trace()
    values = list(it.values)
    values[1] = replace(values[1], saves=(replace(values[1].saves[0], reads=(4,), dropped=5),))
    ops = list(it.ops)
    ops[1] = replace(ops[1], reads=(0,), replayable=True)
    it = replace(it, values=tuple(values), ops=tuple(ops))
    timeline = simulate(it, gpu(), plan_of(it, Keep(), Recompute((1,), 4), AGAIN))
    assert [(s.start_s, s.value) for s in spans(timeline, Lane.COMPUTE)[4:7]] == [
        (5, 1),
        (6, 2),
        (8, -1),
    ]


def test_bytes_are_gone_until_they_are_made_again() -> None:
    it = trace()
    kept = simulate(it, gpu(), plan_of(it))
    assert kept.curve == (3, 4, 8, 7, 7, 3)
    assert simulate(it, gpu(), plan_of(it, Keep(), Keep(), AGAIN)).curve == (3, 4, 8, 3, 7, 3)


def test_what_a_replay_takes_besides_counts_while_it_runs() -> None:
    it = trace(workspace=2)
    chain = replace(it.ops[1], reads=(0,), replayable=True, workspace_bytes=9)
    last = replace(it.ops[2], reads=(1,))
    it = replace(it, ops=(it.ops[0], chain, last, *it.ops[3:]))
    plan = plan_of(it, Keep(), Keep(), Recompute((1, 2), 4))
    verdict = check(it, gpu(), plan, plan.budget)
    assert verdict.ok
    # At op 4: the first value, the third again, the second for the replay, and its workspace.
    assert simulate(it, gpu(), plan).curve == (3, 4 + 9, 8 + 2, 3, 3 + 4 + 1 + 9, 3)
    assert (verdict.peak_bytes, verdict.peak_op) == (17, 4)
    assert not check(it, gpu(), plan, Budget(16)).ok
    rounded = replace(gpu(), allocator=Allocator(8, 0.0, 0))
    assert simulate(it, rounded, plan).curve[4] == 8 + 8 + 8 + 16


def test_the_op_that_reads_needs_its_workspace_when_the_replay_is_over() -> None:
    it = trace(workspace=2)
    ops = list(it.ops)
    ops[4] = replace(ops[4], workspace_bytes=5)
    it = replace(it, ops=tuple(ops))
    assert simulate(it, gpu(), plan_of(it, Keep(), Keep(), AGAIN)).curve[4] == 7 + 5


def test_the_bound_counts_bytes_once_that_could_be_copied_or_made_again() -> None:
    # Copies of the first value are hidden by ops 1 and 5, those of the second by nothing.
    it = trace_of((1, 10, 1, 1, 1, 10, 1), ((4, 0, 6), (4, 2, 4)))
    ops = list(it.ops)
    ops[0] = replace(ops[0], writes=(0,), replayable=True)
    ops[2] = replace(ops[2], writes=(1,))
    ops[3] = replace(ops[3], workspace_bytes=4)
    it = replace(it, ops=tuple(ops))
    best = bound(it, gpu(), Budget(4))
    assert best.seconds == pytest.approx(25 + 4 + 4, rel=1e-4)
    # Made again in a second, the second value would not have to be copied.
    ops[2] = replace(ops[2], replayable=True)
    best = bound(replace(it, ops=tuple(ops)), gpu(), Budget(4))
    assert best.seconds == pytest.approx(25 + 1, rel=1e-4)


def test_the_bound_knows_what_no_link_carries() -> None:
    it = trace()
    alone = replace(gpu(), links=())
    kept = simulate(it, alone, plan_of(it))
    assert max(kept.curve) == 8
    best = bound(it, alone, Budget(7))
    assert (best.status, best.needed_bytes) == ("infeasible", 8)
    assert best.decisions == ("Keep", "Offload", "Recompute", "Encode")
    larger = replace(it, ops=(*it.ops[:3], replace(it.ops[3], workspace_bytes=5), *it.ops[4:]))
    assert bound(larger, alone, Budget(8)).seconds == pytest.approx(7 + 2, rel=1e-4)


def test_digests_are_read_when_a_value_is_saved_and_when_it_is_made_again() -> None:
    it, machine = replace(trace(), source=Source.EAGER), gpu()
    plan = plan_of(it, Keep(), Keep(), AGAIN)
    memory = Link(Tier.DEVICE, Tier.DEVICE, ((8, 8.0),), 8.0, 0.0, "memory")
    # One time in so many, on average.
    each = it.storages[it.values[2].storage].nbytes / 8 / COMPARED_ONE_IN
    timeline = simulate(it, replace(machine, links=(*machine.links, memory)), plan)
    assert each > 0
    assert (timeline.compute_seconds, timeline.replay_seconds) == (7, 2 + 2 * each)
    assert timeline.seconds == 9 + 2 * each


def test_a_graph_has_no_digests_and_takes_nothing_over() -> None:
    it, machine = trace(host_s=0.5), gpu()
    plan = plan_of(it, Keep(), Keep(), AGAIN)
    memory = Link(Tier.DEVICE, Tier.DEVICE, ((8, 8.0),), 8.0, 0.0, "memory", issue_s=0.25)
    machine = replace(machine, links=(*machine.links, memory))

    def busy(timeline: Timeline) -> float:
        return sum(span.end_s - span.start_s for span in spans(timeline, Lane.HOST))

    eager, graph = (
        simulate(replace(it, source=by), machine, plan) for by in Source if by != "static"
    )
    assert graph.replay_seconds == 2 < eager.replay_seconds
    assert busy(graph) == 7 * 0.5
    assert busy(eager) == 7 * 0.5 + 2 * 0.25


def test_hooks_of_a_value_that_is_made_again_take_the_host_time_once() -> None:
    it = replace(trace(host_s=0.5), source=Source.EAGER)
    machine = replace(gpu(), hook_s=0.25)
    timeline = simulate(it, machine, plan_of(it, Keep(), Keep(), AGAIN))
    host = [span.end_s - span.start_s for span in spans(timeline, Lane.HOST)]
    assert sorted(host) == [0.25, *[0.5] * 7]


def test_a_shortcut_is_what_runs() -> None:
    it = trace()
    ops = list(it.ops)
    # Op 2 reads the second value too, which the shortcut does without.
    ops[2] = replace(ops[2], reads=(0, 1), shortcut=Replay(0.5, (0,), (2,)))
    it = replace(it, ops=tuple(ops))
    plan = plan_of(it, Keep(), Keep(), AGAIN)
    assert check(it, gpu(), plan, plan.budget).ok
    assert simulate(it, gpu(), plan).replay_seconds == 0.5
    without = replace(it, ops=tuple(replace(op, shortcut=None) for op in it.ops))
    assert not check(without, gpu(), replace(plan, trace=without.fingerprint), plan.budget).ok
