"""Figures: what is on them, the same file every time, and no matplotlib before it is needed."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from belady.errors import MissingExtraError
from belady.ir.run import Run
from belady.ir.timeline import Cause, Held, Lane, Span, Stall
from belady.ir.trace import Tier
from belady.report import ink
from belady.report.plots import Kind, Point, frontier, memory, save_figure, timeline
from belady.report.series import STALL, Bar, bytes_by_op, dots, envelope, phases, rows
from tests.unit.report.drawn import BUDGET, MIB, recorded, run_of, runs, staged

GIB = 2**30
POINTS = [
    Point("auto", 2 * GIB, 0.4, Kind.OURS),
    Point("auto", 8 * GIB, 0.1, Kind.OURS),
    Point("plain", 9 * GIB, 0.1, Kind.PEER),
    Point("no plan", GIB, math.inf, Kind.BOUND),
    Point("no plan", 4 * GIB, 0.2, Kind.BOUND),
    Point("no plan", 8 * GIB, 0.08, Kind.BOUND),
]


def texts(path: Path) -> list[str]:
    """Text of an SVG, which is text there."""
    root = ET.parse(path).getroot()
    return ["".join(node.itertext()) for node in root.iter() if node.tag.endswith("}text")]


@pytest.mark.parametrize("columns", [1, 2])
@pytest.mark.parametrize("ending", ["svg", "png"])
def test_every_figure_is_the_same_every_time(columns: int, ending: str, tmp_path: Path) -> None:
    for index in range(2):
        figures = {
            "frontier": frontier(POINTS, columns=columns),
            "memory": memory(recorded(), columns=columns),
            "timeline": timeline(recorded(), columns=columns),
        }
        for name, figure in figures.items():
            assert figure.get_figwidth() == ink.WIDTHS[columns]
            save_figure(figure, tmp_path / f"{name}{index}.{ending}")
    for name in figures:
        content = (tmp_path / f"{name}0.{ending}").read_bytes()
        assert content == (tmp_path / f"{name}1.{ending}").read_bytes()
        assert content.startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
        assert not re.search(rb"dc:date|Matplotlib v|Software", content)


def test_svg_text_is_text_and_names_what_is_drawn(tmp_path: Path) -> None:
    save_figure(timeline(recorded()), tmp_path / "figure.svg")
    found = texts(tmp_path / "figure.svg")
    assert {"host", "compute", "copy-out", "copy-in", "time (ms)"} <= set(found)
    assert {"forward", "backward", "copy", "stall", "issuing"} <= set(found)
    assert any(text.startswith("predicted: ") for text in found)
    assert "measured: 12.0 ms" in found  # what is drawn took so long, others took 10


def test_a_measurement_without_its_duration_names_none(tmp_path: Path) -> None:
    run = recorded()
    assert run.measured is not None
    measured = replace(run.measured, recorded=0, recorded_seconds=0.0)
    save_figure(timeline(replace(run, measured=measured)), tmp_path / "figure.svg")
    assert "measured" in texts(tmp_path / "figure.svg")


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_a_figure_says_of_itself_what_it_is_told(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"figure.{ending}"
    save_figure(frontier(POINTS), path, description='[["a & <b>", 1.5]]')
    if ending == "svg":
        described = [it.text for it in ET.parse(path).iter() if it.tag.endswith("}description")]
        assert described == ['[["a & <b>", 1.5]]']
    assert b"escription" in path.read_bytes()
    save_figure(frontier(POINTS), path)
    assert b"escription" not in path.read_bytes()


@pytest.mark.parametrize("name", ["$x_1$ \\frac", "a\x1b[2J\u202eb", "<b>&amp;"])
def test_names_are_shown_as_they_are(name: str, tmp_path: Path) -> None:
    save_figure(frontier([Point(name, GIB, 1.0, Kind.PEER)]), tmp_path / "figure.svg")
    shown = name.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert shown in texts(tmp_path / "figure.svg")


@settings(max_examples=15)
@given(runs())
def test_any_run_is_drawn(run: Run) -> None:
    for draw in (memory, timeline):
        figure = draw(run)
        figure.draw_without_rendering()


def test_legends_stay_on_the_page(tmp_path: Path) -> None:
    points = [Point(f"a method of some length {i}", i * GIB, 1.0, Kind.OURS) for i in range(1, 12)]
    for columns in (1, 2):
        figure = frontier(points, columns=columns)
        save_figure(figure, tmp_path / "figure.png")
        (legend,) = figure.legends
        box, page = legend.get_window_extent(), figure.bbox
        assert page.x0 <= box.x0
        assert box.x1 <= page.x1


# The frontier.


@pytest.mark.parametrize("columns", [1, 2])
def test_many_names_leave_the_axes_their_room(columns: int) -> None:
    heights = []
    for names in (3, 16):
        points = [Point(f"a method of which {n:02}", GIB, 1.0, Kind.PEER) for n in range(names)]
        figure = frontier(points, columns=columns)
        figure.draw_without_rendering()
        share = figure.axes[0].get_position().height
        heights.append(share * figure.get_figheight())
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


def test_frontier_joins_the_points_of_a_method_in_order_of_bytes() -> None:
    axes = frontier([POINTS[1], POINTS[0], POINTS[2]]).axes[0]
    ours, peer = axes.get_lines()
    assert list(ours.get_xdata()) == [2.0, 8.0]
    assert list(ours.get_ydata()) == [400.0, 100.0]
    assert axes.get_xlabel() == "memory held at the peak (GiB)"
    assert (ours.get_linestyle(), peer.get_linestyle()) == ("-", "None")
    assert (ours.get_fillstyle(), peer.get_fillstyle()) == ("full", "left")


@pytest.mark.parametrize(("slowest", "scale"), [(3.0, "linear"), (9.0, "log")])
def test_what_is_many_times_as_slow_presses_nothing_to_the_ground(
    slowest: float, scale: str
) -> None:
    seconds = (0.0 if scale == "linear" else 0.8, 1.0, slowest)
    kinds = (Kind.BOUND, Kind.OURS, Kind.PEER)
    points = [Point(k.name, GIB, s, k) for k, s in zip(kinds, seconds, strict=True)]
    axes = frontier(points).axes[0]
    assert axes.get_yscale() == scale
    low, high = axes.get_ylim()
    assert low < 800 < 1000 * slowest < high
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert "1000" in labels or scale == "linear"


def test_methods_differ_in_grey() -> None:
    kinds = [Kind.OURS] * 26 + [Kind.PEER] * 39
    points = [Point(f"m{i}", n * GIB, 1.0, kind) for i, kind in enumerate(kinds) for n in (1, 2)]
    lines = frontier(points).axes[0].get_lines()
    looks = {(line.get_marker(), line.get_fillstyle()) for line in lines}
    assert len(looks) == len(lines) == len(kinds)
    # What is empty has not passed.
    assert "none" not in {fill for _, fill in looks}
    neighbours = pairwise(lines)
    assert all(one.get_marker() != other.get_marker() for one, other in neighbours)


def test_a_method_has_the_same_look_in_every_figure() -> None:
    first = _looks(frontier([Point(name, GIB, 1.0, Kind.PEER) for name in "abcd"], looks={"d": 0}))
    second = _looks(frontier([Point(name, GIB, 1.0, Kind.PEER) for name in "da"], looks={"d": 0}))
    assert second == {name: first[name] for name in "da"}
    assert len(set(first.values())) == 4
    assert first["d"] == _looks(frontier([Point("x", GIB, 1.0, Kind.PEER)]))["x"]


def _looks(figure: Any) -> dict[Any, tuple[Any, ...]]:
    lines = figure.axes[0].get_lines()
    return {x.get_label(): (x.get_marker(), x.get_fillstyle(), x.get_color()) for x in lines}


def test_what_has_not_passed_is_hollow() -> None:
    passed, failed = Point("a", GIB, 1.0, Kind.OURS), Point("a", 2 * GIB, 2.0, Kind.OURS, False)
    line, empty, named = frontier([failed, passed]).axes[0].get_lines()
    assert list(line.get_xdata()) == [1.0, 2.0]
    assert (list(empty.get_xdata()), list(empty.get_ydata())) == ([2.0], [2000.0])
    assert (line.get_marker(), line.get_color()) == (empty.get_marker(), empty.get_color())
    assert line.get_markerfacecolor() != empty.get_markerfacecolor() == "#FFFFFF"
    assert empty.get_zorder() >= line.get_zorder()
    assert named.get_label() == "hollow: cap not passed"
    assert len(frontier([passed]).axes[0].get_lines()) == 1


def test_the_bound_between_two_budgets_is_that_of_the_larger() -> None:
    axes = frontier(POINTS).axes[0]
    region, edge = axes.patches
    top = axes.get_ylim()[1]
    for steps in (region, edge):
        values, edges, _ = steps.get_data()  # type: ignore[attr-defined]
        assert list(edges) == [0.0, 1.0, 4.0, 8.0]
        assert list(values) == [top, 200.0, 80.0]
    assert region.get_hatch()


@pytest.mark.parametrize(
    "points",
    [
        [],
        [Point("a", -1, 1.0, Kind.OURS)],
        [Point("a", 1, math.inf, Kind.PEER)],
        [Point("a", 1, math.nan, Kind.BOUND)],
        [Point("a", 1, -1.0, Kind.OURS)],
        [Point("a", 1, math.inf, Kind.BOUND)],
    ],
)
def test_what_is_no_measurement_is_refused(points: list[Point]) -> None:
    with pytest.raises(ValueError, match="point"):
        frontier(points)


# Memory.


def test_memory_shows_prediction_budget_and_what_lies_elsewhere() -> None:
    run = run_of(budget=10 * MIB)
    axes = memory(run).axes[0]
    names = [text.get_text() for text in axes.figure.legends[0].get_texts()]
    assert names == ["everything kept", "predicted", "in host memory", "budget"]
    steps = {patch.get_label(): patch.get_data() for patch in axes.patches if _named(patch)}
    assert max(steps["predicted"].values) == run.predicted.peak(Tier.DEVICE) / MIB
    assert max(steps["in host memory"].values) == run.predicted.peak(Tier.HOST) / MIB
    (budget,) = (line for line in axes.get_lines() if line.get_label() == "budget")
    assert list(budget.get_ydata()) == [10.0, 10.0]
    assert axes.get_xlim() == (0, len(run.trace.ops))


def _named(patch: Any) -> bool:
    return hasattr(patch, "get_data") and not patch.get_label().startswith("_")


def test_a_budget_far_above_does_not_flatten_the_rest() -> None:
    axes = memory(run_of(budget=1 << 50)).axes[0]
    assert "budget" not in [line.get_label() for line in axes.get_lines()]
    assert axes.get_ylabel() == "bytes held (MiB)"


def test_measured_bytes_are_dots_or_at_least_a_peak() -> None:
    run = recorded()
    (dots_line,) = (x for x in memory(run).axes[0].get_lines() if x.get_label() == "measured")
    assert list(dots_line.get_xdata()) == [0, 6, 12]
    assert list(dots_line.get_ydata()) == [1.0, 5.0, 2.0]
    assert run.measured is not None
    seen = replace(run.measured, held=())
    lines = memory(replace(run, measured=seen)).axes[0].get_lines()
    (peak,) = (line for line in lines if line.get_label() == "measured peak")
    assert list(peak.get_ydata()) == [6.0, 6.0]


# The numbers behind them.


def test_bytes_by_op_are_those_of_the_plan_and_of_keeping_all() -> None:
    run = run_of()
    held = bytes_by_op(run)
    kept = run_of(policy="baseline", budget=1 << 40)
    assert held["predicted"] == list(run.predicted.curve)
    assert held["everything kept"] == list(kept.predicted.curve)
    assert "on disk" not in held
    assert max(bytes_by_op(staged())["on disk"]) == staged().predicted.peak(Tier.DISK) > 0


def test_phases_cover_the_ops() -> None:
    trace = run_of().trace
    found = phases(trace)
    assert [name for name, _, _ in found] == ["forward", "backward"]
    assert found[0][1] == 0
    assert found[0][2] == found[1][1]
    assert found[1][2] == len(trace.ops)
    assert phases(replace(trace, ops=())) == []


@pytest.mark.parametrize("length", [0, 1, 999, 1000, 1001, 30_000])
def test_an_envelope_is_small_and_nowhere_below(length: int) -> None:
    held = [(index * 7919) % 1000 for index in range(length)]
    edges, steps = envelope(held)
    assert len(steps) <= 1000
    assert len(edges) == len(steps) + 1
    assert edges[-1] == length
    for start, end, height in zip(edges, edges[1:], steps, strict=False):
        assert height == max(held[start:end])


def test_of_many_dots_the_largest_stay() -> None:
    held = [Held(index, 0.0, (index * 7919) % 1009) for index in range(10_000)]
    found = dots(held)
    assert len(found) <= 250
    assert max(item.nbytes for item in found) == 1008
    assert dots(held[:250]) == held[:250]
    assert dots([]) == []


def test_rows_hold_what_lanes_did_and_the_waits_for_copies() -> None:
    run = run_of()
    found = rows(run, run.predicted)
    assert list(found) == ["host", "compute", "copy-out", "copy-in"]
    stalled = sum(bar.end_s - bar.start_s for bar in found["compute"] if bar.kind == STALL)
    assert stalled == pytest.approx(run.predicted.stall_seconds)
    worked = sum(bar.end_s - bar.start_s for bar in found["compute"] if bar.kind != STALL)
    assert worked == pytest.approx(run.predicted.compute_seconds)


def test_an_op_beyond_the_last_and_work_without_one_are_drawn() -> None:
    run = recorded()
    spans = (Span(Lane.COMPUTE, 0.0, 1.0, op=len(run.trace.ops)), Span(Lane.COMPUTE, 1.0, 2.0))
    assert run.measured is not None
    seen = replace(run.measured, spans=spans, stalls=())
    kinds = [bar.kind for bar in rows(run, seen)["compute"]]
    assert kinds == ["backward", "copy"]


def test_bars_too_many_to_tell_apart_keep_their_share_of_time() -> None:
    run = recorded()
    value = run.trace.saved[0]
    at = range(20_000)
    spans = [Span(Lane.COPY_IN, float(i), i + 0.03, value=value) for i in at]
    work = [Span(Lane.COMPUTE, float(i), i + 0.6, op=0) for i in at]
    assert run.measured is not None
    seen = replace(run.measured, spans=(*spans, *work), stalls=())
    found = rows(run, seen)
    for lane, share in (("copy-in", 0.03), ("compute", 0.6)):
        bars = found[lane]
        assert len(bars) <= 1000
        seconds = sum(bar.end_s - bar.start_s for bar in bars)
        assert seconds == pytest.approx(share * 20_000, rel=0.05)
        assert all(one.end_s < other.start_s for one, other in pairwise(bars))


def test_neighbours_of_a_kind_are_one_bar() -> None:
    run = recorded()
    value = run.trace.saved[0]
    spans = tuple(Span(Lane.COPY_IN, i / 1e3, (i + 1) / 1e3, value=value) for i in range(4))
    assert run.measured is not None
    stalls = (Stall(Cause.COPY_IN, 3, value, 0.001, 0.003),)
    found = rows(run, replace(run.measured, spans=spans, stalls=stalls))
    assert found == {
        "compute": [Bar(STALL, 0.003, 0.004)],
        "copy-in": [Bar("copy", 0.0, 0.004)],
    }


# What cannot be drawn.


def test_a_run_without_ops_is_drawn() -> None:
    run = run_of(policy="baseline", budget=BUDGET)
    trace = replace(run.trace, ops=(), storages=(), values=(), anchors=())
    plan = replace(run.plan, trace=trace.fingerprint, assignments=())
    predicted = replace(run.predicted, spans=(), stalls=(), curve=(), seconds=0.0)
    empty = replace(run, trace=trace, plan=plan, predicted=predicted)
    for draw in (memory, timeline):
        draw(empty).draw_without_rendering()


def test_other_endings_and_widths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"figure\.pdf: a figure ends in \.svg or \.png"):
        save_figure(frontier(POINTS), tmp_path / "figure.pdf")
    for draw in (memory, timeline):
        with pytest.raises(ValueError, match="1 or 2 columns"):
            draw(run_of(), columns=3)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (lambda: frontier(POINTS), lambda: memory(run_of()), lambda: timeline(run_of())):
        with pytest.raises(MissingExtraError, match=r"pip install 'belady\[plot\]'"):
            draw()


def test_importing_does_not_load_matplotlib() -> None:
    code = "import sys, belady.report.plots; sys.exit('matplotlib' in sys.modules)"
    source = str(Path(ink.__file__).parents[2])
    environment = {"PYTHONPATH": source}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=60)
