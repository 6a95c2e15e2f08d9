"""The page: it says what the run says, needs nothing else, and no name becomes markup."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given

from belady.ir.collector import uncollected
from belady.ir.curves import curve
from belady.ir.files import load, save
from belady.ir.plan import Assignment, Budget, Encode, Offload, Plan
from belady.ir.residency import away
from belady.ir.run import Run
from belady.ir.timeline import Held, Lane, Span, Timeline
from belady.ir.trace import Phase, Tier
from belady.report.facts import held_at_peak
from belady.report.html import page
from belady.report.html_axis import Axis, axis_of, extremes, nice_step, steps
from belady.report.html_lanes import HEIGHT as LANE_HEIGHT
from belady.report.html_lanes import lanes
from belady.report.html_memory import HEIGHT, memory
from belady.report.html_tables import lives, modules
from belady.simulate import simulate
from belady.units import format_bytes, format_seconds
from tests.support.builder import OpSpec, build_trace
from tests.support.pace import pace, slower
from tests.unit.report.drawn import CPU, GPU, MIB, large_run, recorded, run_of, runs, staged
from tests.unit.report.pages import BAD, SPELLED, Page, misnamed


def test_the_answer_is_the_first_thing_said() -> None:
    told = Page(page(recorded())).text.partition("belady report")[2]
    assert told.lstrip().startswith("It fits: a measured peak of 6.00 MiB, a budget of 64.00")
    assert "waited" in told[:200]
    told = Page(page(run_of())).text.partition("belady report")[2]
    assert told.lstrip().startswith("It should fit: a predicted peak of ")
    assert "Computation should wait" in told[:250]


def test_over_budget_and_without_stall_are_said() -> None:
    run = recorded(run_of(budget=5 * MIB))
    assert "It DOES NOT FIT" in Page(page(run)).text
    kept = run_of(policy="baseline")
    assert "Computation should wait for no copy." in Page(page(kept)).text
    assert "Nothing moves." in Page(page(kept)).text


def test_measured_stands_beside_predicted_and_its_level_is_explained() -> None:
    run = recorded()
    assert run.measured is not None
    measured = replace(run.measured, stall_seconds=0.002, reserved_bytes=7 * MIB)
    run = replace(run, measured=measured)
    text = Page(page(run)).text
    assert "measured overhead 25.0%" in text
    assert "Measured at level 2 (every event), verified in iterations 5 and 6, of 9.00 ms, " in text
    assert "reserved 7.00 MiB" in text
    assert "for a copy-in, to have the bytes" in text
    assert "250 µs" in text
    measured = replace(measured, level=1)
    assert (
        "for a copy-in, to have the bytes 1.32 ms -"
        in Page(page(replace(run, measured=measured))).text
    )
    assert "not yet: every figure is a prediction" in Page(page(run_of())).text


def test_what_one_iteration_showed_is_told_from_what_several_did() -> None:
    read = Page(page(recorded()))
    # The waits of the one that was recorded, and the median of the verified ones.
    assert "Iteration 9 was recorded event by event: 750 µs of 12.0 ms waiting" in read.text
    assert "Computation waited for no copy." in read.text
    assert "computation waits predicted iteration 9" in read.text
    assert "Measured: iteration 9, 12.0 ms" in read.text
    assert "what was measured in iteration 9, op by op" in read.text
    unknown = recorded()
    assert unknown.measured is not None
    measured = replace(unknown.measured, numbers=(), recorded=0, recorded_seconds=0.0)
    text = Page(page(replace(unknown, measured=measured))).text
    assert "verified in iterations of 9.00 ms, 11.0 ms." in text
    assert "was recorded" not in text


@pytest.mark.parametrize("make", [run_of, staged, recorded, lambda: run_of(hardware=CPU)])
def test_every_lane_is_drawn_with_what_it_is_waited_for(make: Callable[[], Run]) -> None:
    run = make()
    labels = [drawing.get("aria-label", "") for drawing in Page(page(run)).drawings]
    for lane in {span.lane for span in run.predicted.spans}:
        assert any(label.startswith(f"Predicted: {lane.value},") for label in labels)
    for lane in {span.lane for span in run.measured.spans} if run.measured else ():
        assert any(label.startswith(f"Measured: {lane.value},") for label in labels)
    for cause in {stall.cause.value for stall in run.predicted.stalls}:
        assert any(f"waits for {cause}" in x or f"waits for the {cause}" in x for x in labels)


def test_the_peak_is_named_and_pieces_of_work_have_titles() -> None:
    run = run_of()
    read = Page(page(run))
    assert run.trace.locate(run.predicted.peak_op) in read.text
    titles = [title.text or "" for title in read.drawing("Predicted: compute").iter("title")]
    assert len(titles) == len(run.trace.ops)
    assert titles[0].startswith("op 0 layer in layer0 (forward), ")


def test_recorded_compute_may_be_several_ops_and_says_so() -> None:
    run = recorded()
    assert run.measured is not None
    spans = (*run.measured.spans, Span(Lane.COMPUTE, 0.003, 0.006, op=2))
    read = Page(page(replace(run, measured=replace(run.measured, spans=spans))))
    (title,) = read.drawing("Measured: compute").iter("title")
    assert title.text == "from op 2 layer in layer2 (forward), 3.00 ms"
    (title,) = read.drawing("Measured: waits for copy-in").iter("title")
    assert title.text is not None
    assert title.text.startswith("value ")
    assert "for the host (no stall) 5.00 µs -" in read.text


@given(runs())
def test_any_run_makes_a_page(run: Run) -> None:
    html = page(run)
    assert Page(html).drawings
    assert html == page(run)


@given(runs())
def test_memory_is_what_the_plan_holds(run: Run) -> None:
    drawn = memory(run, axis_of(run))
    held = curve(run.trace, run.plan, run.hardware.allocator)
    assert drawn is not None
    at_peak = {layer.kind: layer.at_peak for layer in drawn.layers if layer.at_peak}
    assert at_peak == dict(held_at_peak(run))
    assert sum(at_peak.values()) == held[run.predicted.peak_op]
    assert drawn.peak.text == format_bytes(max(held))
    top = min(float(y) for y in re.findall(r"[ V]([\d.]+)", drawn.layers[0].path))
    assert top == pytest.approx(drawn.peak_y, abs=0.06)


@given(runs())
def test_lanes_add_up(run: Run) -> None:
    rows = {row.name: row for row in lanes(run, run.predicted, axis_of(run))}
    for lane in {span.lane for span in run.predicted.spans}:
        spans = [span for span in run.predicted.spans if span.lane is lane]
        assert rows[lane.value].total == format_seconds(sum(s.end_s - s.start_s for s in spans))
        assert all(0 <= box.left <= 100 for box in rows[lane.value].boxes)


def test_narrow_work_is_drawn_as_the_share_of_time_that_it_fills() -> None:
    run = run_of()
    axis = Axis(1.0, axis_of(run).starts)
    # Two in each column of the first half, each a quarter of it; then one far from all others.
    crowd = [Span(Lane.COPY_OUT, n / 2000, (n + 0.5) / 2000) for n in range(1000)]
    lone = Span(Lane.COPY_OUT, 0.75, 0.75001)
    wide = Span(Lane.COPY_OUT, 0.8, 0.9, value=run.trace.saved[0])
    side = replace(run.predicted, spans=(wide, lone, *crowd), stalls=())
    (row,) = lanes(run, side, axis)
    assert row.path == f"M0 {LANE_HEIGHT}v-10h500V{LANE_HEIGHT}z"
    assert [box[:2] for box in row.boxes] == [(75.0, 0.1), (80.0, 10.0)]
    assert row.boxes[1].title.startswith(f"value {run.trace.saved[0]}, 4.00 KiB, saved by layer in")


def test_heights_follow_the_curve() -> None:
    run = run_of()
    drawn = memory(run, axis_of(run))
    assert drawn is not None
    unit = (HEIGHT - drawn.peak_y) / max(run.predicted.curve)
    outline = drawn.layers[0].path.partition(f"V{HEIGHT}")[0]
    found = [float(y) for y in re.findall(r"[ V]([\d.]+)", outline)]
    expected = [HEIGHT - unit * nbytes for nbytes, _ in groupby(run.predicted.curve)]
    assert found == pytest.approx(expected, abs=0.06)


@given(runs())
def test_modules_add_up(run: Run) -> None:
    found = modules(run)
    forward = sum(op.device_seconds for op in run.trace.ops if op.phase is not Phase.BACKWARD)
    assert found.total.forward_s == pytest.approx(forward)
    assert found.total.stall_s == pytest.approx(run.predicted.stall_seconds)
    assert found.left == 0


def test_the_smallest_of_many_modules_are_put_together() -> None:
    specs = [OpSpec(nbytes=MIB, device_us=400 if op < 10 else 4) for op in range(80)]
    found = modules(run_of(build_trace(specs), policy="baseline", budget=1 << 40))
    assert len(found.rows) + found.left == 80
    assert len(found.rows) < 80
    assert [row.name for row in found.rows[:10]] == [f"layer{op}" for op in range(10)]
    kept = sum(row.forward_s for row in found.rows)
    assert kept + found.rest.forward_s == pytest.approx(found.total.forward_s)


def test_bytes_saved_twice_are_counted_once() -> None:
    run = run_of(build_trace([OpSpec(nbytes=MIB, saves_output=True)] * 4), policy="baseline")
    storages = {run.trace.values[index].storage for index in run.trace.saved}
    total = sum(run.trace.storages[index].nbytes for index in storages)
    alias = [*run.trace.values, replace(run.trace.values[run.trace.saved[0]], version=1)]
    trace = replace(run.trace, values=tuple(alias))
    assert modules(replace(run, trace=trace)).total.saved_bytes == total


def test_measured_bytes_are_a_line_where_they_were_counted() -> None:
    run = recorded()
    drawing = Page(page(run)).drawing("Predicted device memory")
    assert [path for path in drawing.iter("path") if path.get("class") == "line measured"]
    assert run.measured is not None
    peak_alone = replace(run, measured=replace(run.measured, held=()))
    drawing = Page(page(peak_alone)).drawing("Predicted device memory")
    assert [line for line in drawing.iter("line") if line.get("class") == "line measured"]
    late = replace(run, measured=replace(run.measured, held=(Held(len(run.trace.ops), 0.0, 1),)))
    assert Page(page(late)).drawings


def test_a_far_budget_does_not_flatten_the_rest() -> None:
    drawn = memory(run_of(budget=1 << 50), axis_of(run_of()))
    assert drawn is not None
    assert drawn.levels[0].y is None
    assert drawn.peak_y < HEIGHT / 5
    assert "budget 1024.00 TiB, far above" in Page(page(run_of(budget=1 << 50))).text


def test_the_name_of_the_peak_is_clear_of_the_lines() -> None:
    run = run_of()
    near = replace(run.plan.budget, device_bytes=int(run.predicted.peak(Tier.DEVICE) * 1.04))
    drawn = memory(replace(run, plan=replace(run.plan, budget=near)), axis_of(run))
    assert drawn is not None
    assert drawn.levels[0].y is not None
    assert drawn.peak_name_y < drawn.levels[0].y - 5
    assert drawn.peak_y - drawn.levels[0].y < 15


def test_a_moved_value_is_gone_between_copy_out_and_copy_in() -> None:
    run = run_of()
    axis = axis_of(run)
    for item in lives(run, axis):
        index = item.saved.value
        decision = run.plan.decisions.get(index)
        if not isinstance(decision, Offload):
            assert item.gone is None
            continue
        left, back = away(run.trace, index, decision)
        assert item.gone is not None
        assert item.gone.left == axis.percent(axis.starts[left])
        assert [part.left for part in item.here] == [
            axis.percent(axis.starts[run.trace.storages[run.trace.values[index].storage].birth]),
            axis.percent(axis.starts[back]),
        ]


def test_an_encoded_value_is_away_until_it_is_decoded() -> None:
    run = run_of(policy="baseline")
    index = run.trace.saved[-1]
    value = run.trace.values[index]
    decision = Encode("bits", 8, value.first_save, value.first_read or value.dropped)
    plan = replace(run.plan, assignments=(Assignment(index, decision, "smaller"),))
    run = replace(run, plan=plan, predicted=simulate(run.trace, run.hardware, plan))
    read = Page(page(run))
    assert "encode (bits)" in read.text
    assert [d for d in read.drawings if d.get("aria-label") == "away and back"]


def test_what_was_not_managed_is_said() -> None:
    run = recorded()
    assert run.measured is not None
    assert "Every save matched the plan." in Page(page(run)).text
    measured = replace(run.measured, defaults=(("cannot be moved", 3),), allocation_retries=2)
    hardware = replace(run.hardware, outside_bytes=3 * MIB)
    text = Page(page(replace(run, measured=measured, hardware=hardware, notes=("a note",)))).text
    assert "3 saves that did not match the plan were kept" in text
    assert "cannot be moved: 3" in text
    assert "in use outside torch (not in the budget): 3.00 MiB" in text
    assert "Note: a note" in text
    assert "The allocator had to flush its cache 2 times." in text


def test_no_name_becomes_markup() -> None:
    plain, read = Page(page(recorded())), Page(page(misnamed(recorded())))
    assert sorted(set(read.names)) == sorted(set(plain.names))
    assert read.names.count("script") == 1
    assert not [key for _, attributes in read.tags for key in attributes if key.startswith("on")]
    assert SPELLED in read.text
    assert BAD.partition("\x1b")[0] in read.text
    assert "\x1b" not in read.html
    assert "\u202e" not in read.html
    assert read.drawings


@pytest.mark.parametrize("make", [run_of, recorded, lambda: misnamed(recorded())])
def test_nothing_is_asked_of_a_network(make: Callable[[], Run]) -> None:
    read = Page(page(make()))
    assert not re.search(r"https?:|@import|//[a-z]", read.html)
    assert set(re.findall(r"url\((.)", read.html)) == {"#"}
    asking = {"src", "href", "srcset", "action", "data", "poster"}
    assert not [tag for tag, attributes in read.tags if asking & attributes.keys()]
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-" in read.html


def test_patterns_that_are_used_exist() -> None:
    html = page(staged())
    used = set(re.findall(r"url\(#([\w-]+)\)", html))
    assert used <= set(re.findall(r'<pattern id="([\w-]+)"', html))


def test_a_run_without_ops_or_events_makes_a_page() -> None:
    run = run_of()
    bare = replace(run, predicted=Timeline(1.0, 1.0, (), 0))
    assert "not measured" in Page(page(bare)).text
    trace = replace(run.trace, ops=(), storages=(), values=(), anchors=())
    plan = Plan(trace.fingerprint, "baseline/1", Budget(0))
    assert "It should fit" in Page(page(Run(trace, GPU, plan, Timeline(0.0, 0.0, (), 0)))).text


def test_extremes_of_every_column_are_kept() -> None:
    columns = [0, 0, 0, 1, 2, 2, 2, 2]
    heights = [5, 9, 1, 4, 2, 2, 8, 3]
    assert extremes(columns, heights) == [1, 2, 3, 4, 6]


def test_steps_go_level_and_then_up_or_down() -> None:
    assert steps([(0, 1), (2, 1.04), (3.25, 0)], 7) == "M0 1H3.2V0H7"
    assert steps([], 7) == ""


@pytest.mark.parametrize(
    ("least", "step"), [(0.3, 0.5), (1, 1), (2.1, 2.5), (6, 10), (0.012, 0.02)]
)
def test_steps_of_an_axis_are_round(least: float, step: float) -> None:
    assert nice_step(least) == pytest.approx(step)


def stepped(seconds: float) -> Run:
    """A run whose optimizer takes so long, after all else."""
    run = run_of()
    trace = run.trace
    last = len(trace.ops) - 1
    op = replace(
        trace.ops[last], phase=Phase.OPTIMIZER, device_seconds=seconds, writes=(), reads=()
    )
    trace = replace(trace, ops=(*trace.ops[:last], op))
    return run_of(trace)


def test_a_long_step_of_the_optimizer_leaves_room_for_the_rest() -> None:
    run = stepped(1.0)
    axis = axis_of(run)
    begins = axis.starts[-2]
    assert axis.tail_s >= begins
    assert axis.percent(axis.tail_s) == 85
    assert axis.percent(axis.end_s) == 100
    moments = [axis.end_s * n / 1000 for n in range(1001)]
    assert axis.columns(moments) == [axis.column(moment) for moment in moments]
    assert axis.columns(moments) == sorted(axis.columns(moments))
    slope = axis.percent(axis.tail_s) / axis.tail_s
    assert slope / (15 / (axis.end_s - axis.tail_s)) == pytest.approx(axis.narrower)
    texts = [tick.text for tick in axis.ticks()]
    assert texts[-1] == format_seconds(axis.end_s)
    assert all(tick.percent <= 85 for tick in axis.ticks()[:-1])
    assert f"time is drawn {axis.narrower:.1f} times narrower" in Page(page(run)).text


def test_time_is_even_where_the_optimizer_is_short_or_something_is_copied_meanwhile() -> None:
    assert axis_of(stepped(1e-5)).tail_s == 0
    assert "narrower" not in Page(page(stepped(1e-5))).text
    run = stepped(1.0)
    late = Span(Lane.COPY_IN, 0.9, 0.95, value=run.trace.saved[0])
    predicted = replace(run.predicted, spans=(*run.predicted.spans, late))
    assert axis_of(replace(run, predicted=predicted)).tail_s == 0


def test_that_measured_bytes_have_no_kinds_is_said() -> None:
    assert "Measured bytes are counted as a sum" in Page(page(recorded())).text
    assert "Measured bytes are counted as a sum" not in Page(page(run_of())).text


@pytest.mark.slow
def test_a_large_run_makes_a_small_page_in_time(tmp_path: Path) -> None:
    save(large_run(), tmp_path / "run.json")
    gc.collect()
    before = pace()
    with uncollected():  # as the command does
        # Of this process alone: others may use the processors too, and slow it down.
        begun = time.process_time()
        html = page(load(Run, tmp_path / "run.json"))
        seconds = time.process_time() - begun
    assert seconds < 5 * slower(before)
    assert len(html.encode()) < 5_000_000
    read = Page(html)
    assert len(read.tags) < 20_000
    assert max(len(path.get("d", "")) for d in read.drawings for path in d.iter("path")) < 60_000
    assert "more, each with less of everything" in read.text
