"""What a report says, and that nothing in it can steer a terminal."""

from __future__ import annotations

from dataclasses import replace

import pytest

from belady.ir.hardware import Allocator
from belady.ir.plan import Budget, Encode, Managed, Plan, Workspace
from belady.ir.run import Run
from belady.ir.timeline import Lane, Measured, Moved, TierPeak
from belady.ir.trace import Source, Tier, Trace
from belady.planners import plan as make_plan
from belady.report.remarks import remarks
from belady.report.text import describe, printable
from belady.simulate import simulate
from belady.units import format_seconds
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine

MIB = 2**20
ALLOCATOR = Allocator(round_bytes=512, margin_fraction=0.0, margin_bytes=0)
MACHINE = machine("cuda", link_rate=5e10, disk=False, disk_rate=1e9, allocator=ALLOCATOR)
TRACE = build_trace([OpSpec(nbytes=MIB, device_us=400)] * 12)
BUDGET = 8 * MIB


def run_of(policy: str = "floor", budget: int = BUDGET, trace: Trace = TRACE) -> Run:
    plan = make_plan(policy, trace, MACHINE, Budget(budget))
    return Run(trace, MACHINE, plan, simulate(trace, MACHINE, plan))


def measured(peak: int = BUDGET, **changes: object) -> Measured:
    peaks = (TierPeak(Tier.DEVICE, peak), TierPeak(Tier.HOST, 5 * MIB))
    moved = (Moved(Lane.COPY_OUT, 5 * MIB, 4),)
    base = Measured(1, 0.010, (0.009, 0.011), peaks, stall_seconds=0.002, moved=moved)
    return replace(base, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seen", "answer"),
    [
        (None, "It should fit: a predicted peak of "),
        (measured(), "It fits: a measured peak of 8.00 MiB, a budget of 8.00 MiB.\n"),
        (measured(BUDGET + 1), "It DOES NOT FIT: "),
        (measured(4 * MIB, reserved_bytes=9 * MIB), "It DOES NOT FIT: "),
        (measured(4 * MIB, reserved_bytes=6 * MIB), "It fits: a measured peak of 4.00 MiB (6.00 "),
    ],
)
def test_answer_comes_first(seen: Measured | None, answer: str) -> None:
    assert describe(replace(run_of(), measured=seen)).startswith(answer)


def row(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return line.replace(name, "").split("  ")


def cells(text: str, name: str) -> list[str]:
    return [cell.strip() for cell in row(text, name) if cell.strip()]


def test_predicted_stands_against_measured() -> None:
    text = describe(replace(run_of(), measured=measured(reserved_bytes=7 * MIB)))
    assert cells(text, "peak of host")[1] == "5.00 MiB"
    assert cells(text, "reserved by torch's allocator")[1] == "7.00 MiB"
    assert cells(text, "time of an iteration")[1] == "10.0 ms"
    assert cells(text, "waiting for copies (stall)")[1] == "2.00 ms"
    assert cells(text, "overhead: stall over the rest")[1] == "25.0%"
    assert cells(text, "copy-out, bytes in copies")[1] == "5.00 MiB in 4"
    assert (
        "level 1 (time, peaks, bytes and stalls), verified in iterations of 9.00 ms, 11.0 ms"
        in text
    )


def test_whose_host_is_busy_hears_of_graphs() -> None:
    def said(run: Run) -> bool:
        return "try engine='auto'" in describe(run)

    busy = build_trace([OpSpec(nbytes=MIB, device_us=40, host_us=90)] * 12)
    run = run_of(trace=busy)
    assert said(run)
    ops = len(busy.ops)
    seconds = format_seconds(90e-6 * ops), format_seconds(sum(it.device_seconds for it in busy.ops))
    assert "({}) than the device to run them ({})".format(*seconds) in describe(run)
    # Not where the device is the one that is waited for, nothing moves, nor in a graph.
    assert not said(run_of())
    assert not said(run_of("baseline", 1 << 40, busy))
    graph = replace(busy, source=Source.GRAPH)
    assert not said(run_of(trace=graph))
    # Nor where it was tried, or what the plan does is not there for graphs.
    assert not said(replace(run, notes=("engine='eager', since a call could not be captured",)))
    first, *rest = run.plan.assignments
    managed = (replace(first, decision=Managed(1, 2, 3, 4)), *rest)
    assert remarks(run)
    assert not remarks(replace(run, plan=replace(run.plan, assignments=managed)))


def test_verified_and_recorded_iterations_are_named() -> None:
    seen = measured(numbers=(5, 6), recorded=9, recorded_seconds=0.013)
    text = describe(replace(run_of(), measured=seen))
    assert "verified in iterations 5 and 6, of 9.00 ms, 11.0 ms.\n" in text
    assert "Iteration 9 was recorded event by event: 0.00 s of 13.0 ms waiting for copies." in text


def test_replays_are_overhead_too() -> None:
    run = replace(run_of(), measured=measured())
    text = describe(replace(run, predicted=replace(run.predicted, replay_seconds=0.003)))
    assert cells(text, "running ops again (replays)") == ["3.00 ms", "-"]
    # Of 10 ms, 2 are waiting and 3 are replays.
    assert cells(text, "overhead: stall and replays over the rest")[1] == "100.0%"


def test_unmeasured_columns_are_empty() -> None:
    text = describe(run_of())
    assert cells(text, "time of an iteration")[1] == "-"
    assert cells(text, "peak of device")[1] == "-"
    assert "Measured at level" not in text
    assert "matched the plan" not in text


def test_level_0_knows_no_stalls() -> None:
    text = describe(replace(run_of(), measured=measured(level=0)))
    assert cells(text, "waiting for copies (stall)")[1] == "-"


def test_largest_values_are_listed_with_their_reason() -> None:
    specs = [OpSpec(nbytes=MIB), OpSpec(nbytes=3 * MIB), OpSpec(nbytes=2 * MIB)] * 6
    text = describe(run_of(trace=build_trace(specs), budget=32 * MIB))
    table = text.partition("The largest saved values")[2].splitlines()[2:]
    assert "3.00 MiB" in table[0]
    assert "offload to host" in table[0]
    assert table[0].endswith("moved: the floor moves all that may move")
    assert sum("MiB" in line for line in table[:12]) == 12


def test_counts_add_up_to_all_saved_values() -> None:
    run = run_of()
    lines = [line for line in describe(run).splitlines() if "saved values, " in line]
    assert sum(int(line.partition(": ")[2].split()[0]) for line in lines) == len(run.trace.saved)


def test_on_a_cpu_what_was_not_captured_is_not_counted() -> None:
    run = replace(run_of(), notes=("not captured, and so not managed: a print, at train.py:3",))
    assert run.trace.device == "cuda"
    assert describe(run).startswith("It ")
    on_cpu = replace(run, trace=replace(run.trace, device="cpu"))
    assert describe(on_cpu).startswith("What was captured (the rest is not counted) ")


def test_nothing_moves_when_everything_fits() -> None:
    text = describe(run_of("auto", 1024 * MIB))
    assert "Nothing moves." in text


def test_an_encoding_is_named() -> None:
    run = run_of("baseline", 1024 * MIB)
    value = run.trace.saved[0]
    found = run.trace.values[value]
    read = found.first_read or found.dropped
    decision = Encode("bits", 8, found.first_save, read)
    assignment = replace(run.plan.assignments[0], value=value, decision=decision)
    text = describe(replace(run, plan=replace(run.plan, assignments=(assignment,))))
    assert "encode (bits): 1 saved values" in text


def test_safe_defaults_are_counted_by_reason() -> None:
    assert "Every save matched the plan." in describe(replace(run_of(), measured=measured()))
    defaults = (("cannot be moved", 3), ("save not in the plan", 4))
    text = describe(replace(run_of(), measured=measured(defaults=defaults)))
    assert "7 saves that did not match the plan were kept" in text
    assert "  save not in the plan: 4\n" in text


def test_what_changes_bits_and_what_is_simulated_alone_is_said() -> None:
    run = run_of()
    plan = replace(
        run.plan,
        numerics=("workspace=memory",),
        layer_algorithms=((0, "lean"),),
        workspace=Workspace.MEMORY,
    )
    text = describe(replace(run, plan=plan, trace=with_algorithm(run.trace)))
    assert "Can change a bit of the result: workspace=memory" in text
    assert "1 of them: one setting holds for the whole iteration" in text


def with_algorithm(trace: Trace) -> Trace:
    from belady.ir.trace import Algorithm

    first = replace(trace.ops[0], algorithms=(Algorithm("lean", 1.0, 0),))
    return replace(trace, ops=(first, *trace.ops[1:]))


def test_bytes_outside_management_are_named() -> None:
    run = run_of()
    hardware = replace(run.hardware, outside_bytes=3 * MIB)
    text = describe(replace(run, hardware=hardware, notes=("margin raised",)))
    assert "in use outside torch (not in the budget): 3.00 MiB" in text
    assert "Note: margin raised" in text


def test_names_cannot_steer_a_terminal() -> None:
    bad = "\x1b[2J\u202e\n"
    ops = tuple(replace(op, name=bad, module=bad) for op in TRACE.ops)
    saves = tuple(
        replace(value, saves=tuple(replace(save, module=bad) for save in value.saves))
        for value in TRACE.values
    )
    trace = replace(TRACE, ops=ops, values=saves, roots=(bad,))
    run = run_of(trace=trace)
    hardware = replace(run.hardware, name=bad, versions=((bad, bad),))
    seen = measured(defaults=((bad, 1),))
    text = describe(replace(run, hardware=hardware, measured=seen, notes=(bad,)))
    assert all(line.isprintable() for line in text.splitlines())
    assert "\\x1b[2J\\u202e\\n" in text


def test_a_run_without_ops_is_described() -> None:
    trace = replace(TRACE, ops=(), storages=(), values=(), anchors=())
    plan = Plan(trace.fingerprint, "baseline/1", Budget(BUDGET))
    predicted = replace(run_of().predicted, peak_op=0, peaks=(), moved=(), stalls=())
    assert describe(Run(trace, MACHINE, plan, predicted)).startswith("It should fit")


def test_printable_leaves_ordinary_text() -> None:
    assert printable("blocks.0 µs ×") == "blocks.0 µs ×"
