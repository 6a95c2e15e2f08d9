"""Phases side by side, and the final error of a prediction in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.files import dumps, loads
from belady.ir.run import Run
from belady.ir.timeline import Lane, Measured, TierPeak, Took
from belady.ir.trace import Phase, Tier
from belady.report.errors import final, phases, predicted_phases
from belady.report.html import page
from belady.report.text import describe
from tests.support.builder import OpSpec, build_trace
from tests.unit.report.drawn import ALLOCATOR, GPU, MIB, run_of
from tests.unit.report.pages import Page


def stepped() -> Run:
    """Eight ops forward, the last of them the loss, eight backward, the last of them the step's."""
    trace = build_trace([OpSpec(nbytes=MIB, device_us=400)] * 8)
    ops = list(trace.ops)
    ops[7] = replace(ops[7], phase=Phase.LOSS)
    ops[-1] = replace(ops[-1], phase=Phase.OPTIMIZER)
    return run_of(replace(trace, ops=tuple(ops)), policy="floor", budget=64 * MIB)


def with_measured(run: Run, scale: float = 1.0, **changes: object) -> Run:
    took = tuple(Took(phase, scale * s) for phase, s in predicted_phases(run).items())
    seconds = scale * run.predicted.seconds
    peaks = (TierPeak(Tier.DEVICE, run.predicted.peak(Tier.DEVICE)),)
    seen = Measured(1, seconds, (seconds,), peaks, phases=took)
    return replace(run, measured=replace(seen, **changes))  # type: ignore[arg-type]


def test_phases_share_the_whole_iteration() -> None:
    run = stepped()
    found = predicted_phases(run)
    assert list(found) == [Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER]
    assert sum(found.values()) == pytest.approx(run.predicted.seconds)
    ends = {s.op: s.end_s for s in run.predicted.spans if s.lane is Lane.COMPUTE}
    assert found[Phase.FORWARD] == pytest.approx(ends[6])
    assert found[Phase.OPTIMIZER] == pytest.approx(ends[15] - ends[14])
    # The floor waits for every copy in backward, and for none of its own in forward.
    assert run.predicted.stall_seconds > 0
    kernels = sum(op.device_seconds for op in run.trace.ops[7:15])
    assert found[Phase.BACKWARD] > kernels


def test_forwards_between_backwards_are_added_up() -> None:
    run = stepped()
    ops = [
        replace(op, phase=(Phase.FORWARD, Phase.BACKWARD)[i % 2])
        for i, op in enumerate(run.trace.ops)
    ]
    found = predicted_phases(replace(run, trace=replace(run.trace, ops=tuple(ops))))
    assert set(found) == {Phase.FORWARD, Phase.BACKWARD}
    assert sum(found.values()) == pytest.approx(run.predicted.seconds)


def test_without_spans_nothing_is_predicted() -> None:
    run = stepped()
    bare = replace(run, predicted=replace(run.predicted, spans=()))
    assert predicted_phases(bare) == {}
    assert list(phases(bare)) == []


def test_phases_stand_side_by_side_with_their_error() -> None:
    run = with_measured(stepped(), 1.25)
    rows = {name.strip(): rest for name, *rest in phases(run)}
    assert list(rows) == ["forward", "loss and backward", "optimizer's step"]
    assert all(seen.endswith(" (+25.0%)") for _, seen in rows.values())
    assert rows["forward"][0] in describe(run)
    assert rows["optimizer's step"][1] in Page(page(run)).text.replace("\xa0", " ")


def test_the_final_error_is_one_line() -> None:
    (line,) = final(with_measured(stepped(), 0.5))
    assert line == "Final error, measured against predicted: time -50.0%, peak as predicted."
    assert line in describe(with_measured(stepped(), 0.5))


def test_reserved_bytes_stand_against_what_the_margin_allows() -> None:
    hardware = replace(GPU, allocator=replace(ALLOCATOR, margin_fraction=0.0, margin_bytes=MIB))
    peak = stepped().predicted.peak(Tier.DEVICE)
    run = replace(stepped(), hardware=hardware)
    (line,) = final(with_measured(run, reserved_bytes=(peak + MIB) // 2))
    assert "reserved 50.0% of the" in line


def test_nothing_measured_has_no_error() -> None:
    assert list(final(stepped())) == []
    assert "Final error" not in describe(stepped())


def test_phases_are_part_of_the_document() -> None:
    run = with_measured(stepped())
    assert loads(Run, dumps(run)) == run
