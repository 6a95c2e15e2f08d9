"""Ops are corrected by the time between boundaries that an engine passed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from belady.ir.plan import Plan, Recompute
from belady.ir.timeline import Cause
from belady.ir.trace import Phase, Trace
from belady.measure.monitor import Sample
from belady.measure.pacing import with_pace_of
from belady.simulate import simulate
from tests.unit.simulate.cases import gpu, plan_of, trace_of

FOUR = trace_of([1.0, 1.0, 1.0, 1.0], [(1, 0, 3)])
KEPT = plan_of(FOUR)
# Kernels that nobody has watched.
pace_of = partial(with_pace_of, made=lambda op: True)


def paced(*between: tuple[int, int, float]) -> Sample:
    paced = {(start, stop): seconds for start, stop, seconds in between}
    return Sample(0.0, 9.0, paces=lambda: paced)


def seconds_with(trace: Trace, plan: Plan, *samples: Sample) -> list[float]:
    """Of each op, which another look at the same samples leaves as they are."""
    found = pace_of(trace, plan, gpu(), samples)
    assert found is not None
    assert pace_of(found, plan, gpu(), samples) is None
    return [op.device_seconds for op in found.ops]


def test_kernels_take_what_they_took_between_the_same_boundaries() -> None:
    # The faster of two iterations; what lies before and after is not known better.
    samples = paced((1, 3, 1.0), (3, 4, 3.0)), paced((1, 3, 1.2), (3, 4, 2.0))
    assert seconds_with(FOUR, KEPT, *samples) == [1.0, 0.5, 0.5, 2.0]
    assert seconds_with(FOUR, KEPT, paced((0, 2, 1.0))) == [0.5, 0.5, 1.0, 1.0]


def test_a_stretch_makes_no_op_many_times_as_slow_or_fast() -> None:
    found = pace_of(FOUR, KEPT, gpu(), [paced((0, 2, 90.0), (2, 4, 0.01))])
    assert found is not None
    assert [op.device_seconds for op in found.ops] == [4.0, 4.0, 0.25, 0.25]


def test_no_op_is_slower_than_it_was_watched() -> None:
    # The host was late, say: four times over that would make kernels of nothing but waiting.
    found = with_pace_of(FOUR, KEPT, gpu(), [paced((0, 2, 1.0), (2, 4, 9.0))])
    assert found is not None
    assert [op.device_seconds for op in found.ops] == [0.5, 0.5, 1.0, 1.0]
    assert with_pace_of(FOUR, KEPT, gpu(), [paced((0, 4, 9.0))]) is None


def test_what_not_all_iterations_passed_says_nothing() -> None:
    samples = paced((0, 2, 1.0), (2, 4, 1.0)), paced((0, 2, 1.0), (2, 3, 9.0), (3, 4, 9.0))
    assert seconds_with(FOUR, KEPT, *samples) == [0.5, 0.5, 1.0, 1.0]


def test_while_the_allocator_flushes_its_cache_kernels_take_no_more_than_they_show() -> None:
    # Of the first two ops less than was thought, and of the others all that the host did.
    flushed = replace(paced((0, 2, 1.0), (2, 4, 9.0)), retries=1, held=True)
    assert seconds_with(FOUR, KEPT, flushed) == [0.5, 0.5, 1.0, 1.0]
    # Where one did not, it alone counts.
    calm = paced((0, 2, 1.5))
    assert seconds_with(FOUR, KEPT, flushed, calm) == [0.75, 0.75, 1.0, 1.0]
    assert seconds_with(FOUR, KEPT, replace(flushed, retries=0)) == [0.5, 0.5, 4.5, 4.5]


def test_a_flush_makes_no_kernel_faster_than_anything_shows() -> None:
    # What a host was late with is a part of the most that kernels take.
    late = trace_of([1.0] * 4, host_s=1.5)
    flushed = replace(paced((0, 4, 5.0)), retries=1, held=True)
    assert pace_of(late, plan_of(late), gpu(), [flushed]) is None
    # Nor does one that reads much and one that reads little share otherwise than before.
    of_both = replace(paced((0, 2, 2.0)), retries=1)
    assert pace_of(FOUR, KEPT, gpu(), [of_both]) is None


def test_what_is_made_again_is_no_part_of_the_ops_that_ask_for_it() -> None:
    made_again = plan_of(FOUR, Recompute((0,), 3))
    assert simulate(FOUR, gpu(), made_again).seconds == 5.0
    assert seconds_with(FOUR, made_again, paced((2, 4, 2.0))) == [1.0, 1.0, 0.5, 0.5]
    # No less than nothing is left for them.
    assert pace_of(FOUR, made_again, gpu(), [paced((2, 4, 1.0))]) is None


def test_a_device_without_work_is_no_slow_kernel() -> None:
    late = trace_of([0.25] * 4, host_s=1.0)
    plan = plan_of(late)
    predicted = simulate(late, gpu(), plan)
    assert {stall.cause for stall in predicted.stalls} == {Cause.HOST}
    assert pace_of(late, plan, gpu(), [paced((0, 2, 2.25), (2, 4, 2.0))]) is None


def test_what_a_device_shows_that_was_held_back_is_all_that_counts() -> None:
    # The host is late, in an iteration that is verified later than it was thought to be.
    late = trace_of([1.0, 1.0], host_s=2.0)
    plan = plan_of(late)
    held = replace(paced((0, 1, 0.5), (1, 2, 1.5)), held=True)
    for samples in ([held, paced((0, 1, 0.25), (1, 2, 4.0))], [paced((0, 2, 9.0)), held], [held]):
        assert seconds_with(late, plan, *samples) == [0.5, 1.5]


def test_what_is_made_again_takes_what_its_ops_were_seen_to_take() -> None:
    made_again = plan_of(FOUR, Recompute((0,), 3))
    # A half of the second then seen is of the first op, and one is left for the last two.
    both = paced((0, 2, 1.0), (2, 4, 1.5))
    assert seconds_with(FOUR, made_again, both) == [0.5, 0.5, 0.5, 0.5]


def test_what_runs_between_graphs_is_known_from_then_on() -> None:
    ops = trace_of([1.0, 1.0, 1.0, 0.0, 1.0, 1.0]).ops
    trace = replace(FOUR, ops=(*ops[:3], replace(ops[3], phase=Phase.LOSS), *ops[4:]))
    plan = plan_of(trace)
    apart = paced((0, 3, 3.0), (3, 4, 3.0), (4, 5, 1.0), (5, 6, 1.0))
    assert seconds_with(trace, plan, apart) == [1.0, 1.0, 1.0, 3.0, 1.0, 1.0]
    # What is made again at its boundary runs before it is passed.
    made_again = plan_of(replace(trace, values=FOUR.values), Recompute((0,), 3))
    found = pace_of(trace, made_again, gpu(), [paced((0, 3, 9.0), (3, 4, 0.5))])
    assert found is not None
    assert found.ops[3].device_seconds == 0.0


def test_what_takes_nearly_nothing_is_known_with_what_follows() -> None:
    short = trace_of([1e-5, 1.0, 1.0])
    sample = paced((0, 1, 1e-4), (1, 2, 0.5), (2, 3, 1.0))
    assert seconds_with(short, plan_of(short), sample) == pytest.approx([5e-6, 0.5, 1.0], rel=1e-3)
    # Not with what follows something else.
    apart = paced((0, 1, 1e-4), (2, 3, 0.5))
    assert seconds_with(short, plan_of(short), apart) == [1e-5, 1.0, 0.5]


@pytest.mark.parametrize("trace", [FOUR, replace(FOUR, device="cpu")])
def test_a_pace_that_agrees_or_was_not_taken_changes_nothing(trace: Trace) -> None:
    plan = plan_of(trace)
    assert pace_of(trace, plan, gpu(), [Sample(0.0, 9.0)]) is None
    # One op of many is no reason to plan anew.
    assert pace_of(trace, plan, gpu(), [paced((0, 1, 1.03), (1, 4, 3.0))]) is None
    changed = pace_of(trace, plan, gpu(), [paced((0, 4, 2.0))])
    assert (changed is None) == (trace.device == "cpu")


def test_what_a_compiler_makes_takes_what_is_left() -> None:
    """Of a library's kernel nobody makes another: it takes what it was seen to take."""
    trace = trace_of([1.0, 1.0, 3.0])
    ops = (replace(trace.ops[0], name="library"), *trace.ops[1:])
    trace = replace(trace, ops=ops)
    plan = plan_of(trace)

    def seconds(whole: float, *, held: bool) -> list[float]:
        sample = replace(paced((0, 3, whole)), held=held)
        found = with_pace_of(trace, plan, gpu(), [sample], lambda op: op.name != "library")
        assert found is not None
        return [op.device_seconds for op in found.ops]

    assert seconds(3.0, held=True) == [1.0, 0.5, 1.5]
    # As fast as they are, where nothing waits for the host; nothing takes nothing.
    assert seconds(1.04, held=True) == pytest.approx([0.9886, 0.0129, 0.0386], abs=1e-4)
    assert seconds(1.04, held=False) == pytest.approx([0.9886, 0.25, 0.75], abs=1e-4)
    # What takes many times what was guessed is not the compiler's doing alone.
    assert seconds(34.0, held=True) == [2.0, 8.0, 24.0]
    assert seconds(34.0, held=False) == [1.0, 4.0, 12.0]


def test_an_op_that_runs_in_many_small_ones_is_guessed_by_its_bytes() -> None:
    trace = trace_of([1.0, 1.0, 1.0, 97.0, 97.0], [(100, 0, 3)] * 4)
    ops = (replace(op, reads=(index,)) for index, op in enumerate(trace.ops[:4]))
    # Of what reads nothing its own seconds are all that is known.
    trace = replace(trace, ops=(*ops, trace.ops[4]))
    plan = plan_of(trace)
    for samples, expected in (((0, 4, 5.0), [1.0, 1.0, 1.0, 2.0, 97.0]), ((3, 5, 9.9), [0.2, 9.7])):
        found = pace_of(trace, plan, gpu(), [replace(paced(samples), held=True)])
        assert found is not None
        seconds = [op.device_seconds for op in found.ops]
        assert seconds[-len(expected) :] == pytest.approx(expected)
