"""Figures that were worked out by hand; see `tests.unit.explain.cases`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.errors import PlanMismatchError
from belady.explain import Choice, Explanation, Weighed, describe, explain
from belady.explain.choices import changed, keep
from belady.ir.files import dumps, loads
from belady.ir.legality import check
from belady.ir.plan import Assignment, Budget, Keep, Offload, Recompute
from belady.ir.run import Run
from belady.ir.trace import Tier
from tests.unit.explain.cases import PAGE, a_trace, gpu, run_of
from tests.unit.simulate.cases import trace_of


def weighed(run: Run, what: str = "0") -> Weighed:
    found = explain(run, what).values[0].weighed
    assert found is not None
    return found


def choice(of: Weighed, name: str) -> Choice:
    (found,) = (it for it in of.choices if it.name == name)
    return found


def test_a_stall_of_three_seconds_goes_away_when_it_is_kept() -> None:
    run = run_of(a_trace())
    explanation = explain(run, "0")
    found = weighed(run)
    assert explanation.planned.seconds == run.predicted.seconds == 12
    assert found.decision == "offload to host"
    assert (found.stall_seconds, found.cost_seconds) == (3, 3)
    kept = choice(found, "keep")
    assert kept.outcome is not None
    assert (kept.outcome.seconds, kept.outcome.stall_seconds) == (9, 0)
    assert (kept.seconds_change, kept.peak_change) == (-3, 2 * PAGE)


def test_the_budget_to_keep_it_includes_the_margin_and_is_accepted() -> None:
    run = run_of(a_trace())
    found = weighed(run)
    assert found.keep_bytes == 5 * PAGE * 5 // 4 + 100
    kept = changed(run.plan, keep([0]))
    enough, short = (Budget(found.keep_bytes + more) for more in (0, -1))
    assert check(run.trace, run.hardware, kept, enough).ok
    assert not check(run.trace, run.hardware, kept, short).ok
    assert not choice(found, "keep").legal
    assert str(found.keep_bytes) in choice(found, "keep").problems[0]
    assert choice(weighed(replace_budget(run, found.keep_bytes)), "keep").legal
    assert not choice(weighed(replace_budget(run, found.keep_bytes - 1)), "keep").legal


def replace_budget(run: Run, nbytes: int) -> Run:
    return replace(run, plan=replace(run.plan, budget=Budget(nbytes)))


def test_the_next_best_choice_is_the_fastest_legal_one() -> None:
    # Run again, op 0 takes 4 s where the copy is waited for 3 s; keeping it is faster, but illegal.
    found = weighed(run_of(a_trace()))
    again = choice(found, "recompute")
    assert (again.seconds_change, again.peak_change, again.legal) == (1, 0, True)
    assert again.outcome is not None
    assert again.outcome.replay_seconds == 4
    assert found.choices[found.next_best] is again
    # With room it is kept.
    roomy = weighed(run_of(a_trace(), budget=1 << 20))
    assert roomy.choices[roomy.next_best].name == "keep"


def test_without_any_other_choice_there_is_no_next_best() -> None:
    found = weighed(run_of(a_trace(replayable=False)))
    assert found.next_best == -1
    again = choice(found, "recompute")
    assert again.outcome is None
    assert "op 0 op0 in module 'stem' (forward) makes it and is not replayable" in again.problems[0]


def test_fewer_bytes_are_a_choice_where_they_can_be() -> None:
    # Device memory reads and writes a page a second; bools that a comparison made are bits.
    trace = a_trace()
    ops = (replace(trace.ops[0], name="aten.gt.Scalar"), *trace.ops[1:])
    (value,) = trace.values
    bools = replace(value, saves=(replace(value.saves[0], dtype="bool"),))
    hardware = gpu()
    within = replace(hardware.links[0], target=Tier.DEVICE, path="device")
    hardware = replace(hardware, links=(*hardware.links, within))
    run = run_of(replace(trace, ops=ops, values=(bools,)), hardware=hardware)
    found = choice(weighed(run), "encode (bits)")
    assert found.detail == "in 1.50 KiB until op 3"
    assert found.outcome is not None
    # Eight elements a byte: 3 pages read, six times as many passed, 3/8 written; nine to decode.
    assert found.outcome.seconds == 9 + (21 + 3 / 8) + (30 + 3 / 8)
    assert "encode (bits)" not in [it.name for it in weighed(run_of(trace)).choices]


def test_each_tier_is_a_choice_with_its_own_seconds() -> None:
    # Through the host to the disk: out in 3 + 6 s from 4 s to 13 s, back in 6 + 3 s to 22 s.
    found = weighed(run_of(a_trace(), hardware=gpu(disk_pages_per_s=0.5)))
    disk = choice(found, "offload to disk")
    assert disk.outcome is not None
    assert disk.outcome.seconds == 23
    assert disk.seconds_change == 11
    assert "offload to disk" not in [it.name for it in weighed(run_of(a_trace())).choices]


def test_a_copy_is_given_the_memory_that_is_left_over() -> None:
    # There is room for the bytes during op 3, not during op 2.
    trace = trace_of([4, 3, 5, 1, 1], [(3 * PAGE, 0, 4)])
    ops = list(trace.ops)
    ops[2] = replace(ops[2], workspace_bytes=2 * PAGE)
    trace = replace(trace, ops=tuple(ops))
    host = choice(weighed(run_of(trace, Keep())), "offload to host")
    assert host.outcome is not None
    # Brought back while op 3 runs, it is waited for 2 s; as at the floor it would be 3 s.
    assert (host.outcome.seconds, host.detail) == (16, "gone from op 2 until op 3")
    assert host.legal
    # Without that room it comes back when it is read.
    ops[3] = replace(ops[3], workspace_bytes=1)
    trace = replace(trace, ops=tuple(ops))
    host = choice(weighed(run_of(trace, Keep())), "offload to host")
    assert host.outcome is not None
    assert (host.outcome.seconds, host.detail) == (17, "gone from op 2 until op 4")


def test_what_is_kept_costs_nothing_and_shows_what_it_would() -> None:
    run = run_of(a_trace(), Keep(), budget=1 << 20)
    found = weighed(run)
    assert (found.decision, found.cost_seconds, found.stall_seconds) == ("keep", 0, 0)
    assert found.keep_bytes == explain(run, "0").planned.needed_bytes == 5 * PAGE * 5 // 4 + 100
    assert [it.name for it in found.choices] == ["offload to host", "recompute"]
    assert [it.seconds_change for it in found.choices] == [3, 4]
    assert found.next_best == 0


def test_a_plan_over_its_budget_is_explained() -> None:
    run = run_of(a_trace(), Keep())
    explanation = explain(run, "0")
    assert "needs a budget of" in explanation.problems[0]
    found = weighed(run)
    assert found.choices[found.next_best].name == "offload to host"


def test_copies_at_other_times_are_a_choice_if_they_are_faster() -> None:
    # There is room for the bytes to stay through op 1, but the plan lets go of them at once.
    slow = run_of(a_trace(), Offload(Tier.HOST, 0, 1, 3, 3))
    assert slow.predicted.seconds == 15
    found = weighed(slow)
    host = choice(found, "offload to host")
    assert (host.seconds_change, host.detail) == (-3, "gone from op 2 until op 3")
    # Placed so already, there is nothing to gain.
    assert "offload to host" not in [it.name for it in weighed(run_of(a_trace())).choices]


def test_a_longer_replay_than_need_be_is_beaten_by_the_cheapest() -> None:
    trace = a_trace(pages=3)
    ops = list(trace.ops)
    ops[1] = replace(ops[1], reads=(0,), writes=(1,), replayable=True)
    storage = replace(trace.storages[0], birth=1, released=2)
    value = replace(trace.values[0], storage=1, producer=1)
    value = replace(value, saves=(replace(value.saves[0], op=1, packed=2, ordinal=1),))
    first = replace(trace.values[0], saves=(replace(trace.values[0].saves[0], dropped=4),))
    trace = replace(
        trace,
        ops=tuple(ops),
        storages=(*trace.storages, storage),
        values=(first, value),
    )
    both = run_of(trace, Keep(), budget=1 << 20)
    for ops_again, names in (((0, 1), ["keep", "recompute"]), ((1,), ["keep"])):
        decided = Assignment(1, Recompute(ops_again, 3))
        run = replace(both, plan=replace(both.plan, assignments=(decided,)))
        found = weighed(run, "1")
        assert found.decision == "recompute"
        assert [it.name for it in found.choices if it.name != "offload to host"] == names
    assert found.cost_seconds == 3


def test_a_replay_that_starts_from_a_value_holds_it_back() -> None:
    trace = trace_of([1, 1, 1, 1, 1], [(PAGE, 0, 4), (PAGE, 1, 3)])
    ops = list(trace.ops)
    ops[0] = replace(ops[0], writes=(0,), replayable=True)
    ops[1] = replace(ops[1], reads=(0,), writes=(1,), replayable=True)
    trace = replace(trace, ops=tuple(ops))
    run = run_of(trace, Keep(), budget=1 << 20)
    recompute = Assignment(1, Recompute((1,), 3))
    run = replace(run, plan=replace(run.plan, assignments=(recompute,)))
    found = weighed(run)
    assert choice(found, "recompute").problems == ("value 1 is recomputed from it",)
    host = choice(found, "offload to host")
    assert host.legal
    assert int(host.detail.split()[-1]) <= 3


def test_a_plan_that_breaks_a_rule_is_refused_in_the_words_of_the_judge() -> None:
    run = run_of(a_trace())
    broken = replace(run.plan, assignments=(Assignment(0, Offload(Tier.HOST, 2, 1, 3, 3)),))
    with pytest.raises(PlanMismatchError, match="these must not decrease"):
        explain(replace(run, plan=broken), "0")


def test_a_module_is_weighed_as_one() -> None:
    trace = trace_of([4, 3, 1, 1, 1, 1], [(3 * PAGE, 0, 5), (PAGE, 1, 4)])
    values = [
        replace(value, saves=(replace(value.saves[0], module=module),))
        for value, module in zip(trace.values, ("stem.a", "stem.b"), strict=True)
    ]
    trace = replace(trace, values=tuple(values))
    run = run_of(trace, Offload(Tier.HOST, 0, 2, 5, 5), budget=1 << 20)
    explanation = explain(run, "stem")
    story = explanation.module
    assert story is not None
    assert story.weighed is not None
    assert (story.modules, story.values, story.nbytes) == (("stem.a", "stem.b"), 2, 4 * PAGE)
    assert [(it.name, it.values, it.nbytes) for it in story.decisions] == [
        ("offload to host", 1, 3 * PAGE),
        ("keep", 1, PAGE),
    ]
    assert [it.value for it in explanation.values] == [0, 1]
    # Out under op 1, back at op 5: 3 s.
    assert run.predicted.seconds == 14
    assert (story.weighed.decision, story.weighed.cost_seconds) == ("", 3)
    assert choice(story.weighed, "offload to host").values == 2
    assert story.weighed.choices[story.weighed.next_best].name == "keep"


def test_what_only_some_of_a_module_can_do_is_counted() -> None:
    trace = trace_of([4, 3, 1, 1, 1, 1], [(3 * PAGE, 0, 5), (PAGE, 1, 5)])
    values = [
        replace(value, saves=(replace(value.saves[0], module="stem"),)) for value in trace.values
    ]
    ops = [replace(trace.ops[0], writes=(0,), replayable=True), *trace.ops[1:]]
    trace = replace(trace, values=tuple(values), ops=tuple(ops))
    run = run_of(trace, Offload(Tier.HOST, 0, 2, 5, 5), budget=1 << 20)
    story = explain(run, "stem").module
    assert story is not None
    assert story.weighed is not None
    again = choice(story.weighed, "recompute")
    assert (again.values, len(story.weighed.values)) == (1, 2)
    assert "recompute: 1 of 2 values, at op 5 by running again: op0" in describe(
        explain(run, "stem")
    )


def test_an_explanation_is_a_document() -> None:
    explanation = explain(run_of(a_trace(), hardware=gpu(disk_pages_per_s=0.5)), "stem")
    assert loads(Explanation, dumps(explanation)) == explanation


def test_progress_names_each_part() -> None:
    said: list[str] = []
    explain(run_of(a_trace()), "stem", said.append)
    assert said == ["all of stem at once", "value 0, 1 of 1"]


def test_another_prediction_is_noted() -> None:
    run = run_of(a_trace())
    assert explain(run, "0").notes == ()
    other = replace(run, predicted=replace(run.predicted, seconds=1.0))
    assert "predicted by another version" in explain(other, "0").notes[0]
