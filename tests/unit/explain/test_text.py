"""What a user reads; the figures are those of `tests.unit.explain.cases`."""

from __future__ import annotations

from dataclasses import replace

from belady.explain import describe, explain
from belady.ir.plan import Keep
from belady.ir.run import Run
from belady.ir.timeline import Measured
from tests.unit.explain.cases import a_trace, gpu, run_of
from tests.unit.simulate.cases import trace_of

ONE = """\
Net on by hand (cuda), planned by by hand/1
Predicted: 12.0 s an iteration, 3.00 s of it waiting for copies
           a peak of 12.00 KiB, which needs a budget of 15.10 KiB; 15.10 KiB are given
No plan can be faster than 10.1 s in this budget (bound): this one is predicted 18.3% above it.

Value 0: saved by op0 in stem, as its output
  scalar of torch.uint8, 12.00 KiB (activation)
  saved at op 1, first read at op 3: 2 ops, 7.00 s as predicted
  Decision: offload to host (moved: says so)
  Costs 3.00 s: with it kept, the iteration would take 9.00 s.
  Compute waits 3.00 s for its copies.
  Keeping it needs a budget of 25.10 KiB (25700 bytes), 10.00 KiB more than the 15.10 KiB given.

  choice                       iteration   change       peak     change      needs  fits
  as planned: offload to host     12.0 s           12.00 KiB             15.10 KiB   yes
  keep                            9.00 s  -3.00 s  20.00 KiB  +8.00 KiB  25.10 KiB    no
  recompute                       13.0 s  +1.00 s  12.00 KiB       same  15.10 KiB   yes
  recompute: at op 3 by running again: op0
  keep does not fit: op 2 op2 in module '' (forward) holds 20480 bytes at the peak and so needs \
a budget of 25700, more than the 15460 given

  The next best choice is to recompute it: the iteration takes 1.00 s more, at the same peak.
"""


def text(run: Run, what: str | None = None) -> str:
    return describe(explain(run, what))


def test_one_value_from_top_to_bottom() -> None:
    assert text(run_of(a_trace()), "0") == ONE


def test_the_largest_values_each_have_their_answer() -> None:
    trace = trace_of([1] * 30, [(4096 * (index + 1), index, 29) for index in range(12)])
    shown = text(run_of(trace, budget=1 << 30))
    assert "The largest 10 of 12 saved values:" in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith("Value ")] == [
        f"{index}:" for index in range(11, 1, -1)
    ]
    assert "All choices for one of them: belady explain RUN 11" in shown


def test_a_faster_choice_within_the_budget_is_called_so() -> None:
    shown = text(run_of(a_trace(), budget=1 << 20), "0")
    assert (
        "The next best choice is to keep it, which is faster than the plan: the iteration takes "
        "3.00 s less, its peak is 8.00 KiB higher." in shown
    )
    assert "Keeping it needs a budget of 25.10 KiB; 1.00 MiB are given." in shown


def test_what_is_kept_what_cannot_be_and_what_is_left() -> None:
    trace = a_trace(replayable=False)
    shown = text(run_of(trace, Keep(), hardware=replace(gpu(), links=()), budget=1 << 20), "0")
    assert "Costs nothing: the plan as it is keeps it." in shown
    assert "recompute cannot be: op 0 op0 in module 'stem' (forward) makes it" in shown
    assert "No other choice is legal within the budget." in shown


def test_a_value_that_cannot_move_says_why() -> None:
    trace = a_trace()
    trace = replace(trace, storages=(replace(trace.storages[0], released=4),))
    for what in ("0", None):
        shown = text(run_of(trace, Keep(), budget=1 << 20), what)
        assert "It cannot move: something besides autograd holds it to the end" in shown
        assert "next best" not in shown


def test_a_plan_over_its_budget_is_said_to_be() -> None:
    shown = text(run_of(a_trace(), Keep()), "0")
    assert "The plan as it is may not run: op 2 op2 in module ''" in shown
    assert "10.00 KiB more than the 15.10 KiB given" in shown


def test_a_module_is_summed_up() -> None:
    shown = text(run_of(a_trace()), "stem")
    assert "Module stem: 1 saved value, 12.00 KiB" in shown
    assert "  offload to host: 1 saved value, 12.00 KiB" in shown
    head = a_trace()
    head = replace(head, ops=(*head.ops[:3], replace(head.ops[3], module="head")))
    shown = text(run_of(head), "head")
    assert "Autograd saves nothing in this part beside parameters and buffers." in shown


def test_a_run_that_saves_nothing_says_so() -> None:
    trace = replace(a_trace(), storages=(), values=())
    trace = replace(trace, ops=tuple(replace(op, writes=()) for op in trace.ops))
    run = run_of(trace, Keep())
    run = replace(run, plan=replace(run.plan, assignments=()))
    assert "Autograd saves nothing in this run beside parameters and buffers." in text(run)


def test_what_was_measured_stands_beside_the_prediction() -> None:
    run = replace(run_of(a_trace()), measured=Measured(0, 12.5, (12.5,), ()))
    assert "3.00 s of it waiting for copies; measured: 12.5 s" in text(run, "0")


def test_names_cannot_steer_a_terminal() -> None:
    trace = a_trace()
    save = replace(trace.values[0].saves[0], module="stem\x1b[2J", dtype="\x07")
    trace = replace(trace, values=(replace(trace.values[0], saves=(save,)),))
    for what in ("0", "stem*", None):
        shown = text(run_of(trace), what)
        assert all(line.isprintable() for line in shown.splitlines() if line)
        assert r"stem\x1b[2J" in shown
