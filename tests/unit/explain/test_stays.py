from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from belady.explain.stays import why_it_stays
from belady.ir.hardware import HardwareProfile
from belady.ir.trace import StorageKind, Trace
from belady.planners.moves import movable
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import instances
from tests.unit.explain.cases import PAGE, a_trace
from tests.unit.simulate.cases import trace_of


@given(instances(max_ops=10))
def test_the_words_follow_the_rule_of_the_planners(case: tuple[Trace, HardwareProfile]) -> None:
    trace, _ = case
    free = {index for index in range(len(trace.values)) if why_it_stays(trace, index) is None}
    assert free == set(movable(trace))


def with_storage(**fields: object) -> Trace:
    trace = a_trace()
    return replace(trace, storages=(replace(trace.storages[0], **fields),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trace", "kind", "words"),
    [
        (with_storage(kind=StorageKind.PARAMETER), "not an activation", "it is a parameter"),
        (with_storage(kind=StorageKind.STATE), "not an activation", "it is optimizer state"),
        (with_storage(nbytes=PAGE - 1), "too small", "less than the 4.00 KiB"),
        (
            with_storage(kind=StorageKind.INPUT, released=4, death=4),
            "held by others",
            "the caller holds it to the end",
        ),
        (
            with_storage(released=3),
            "held by others",
            "something besides autograd holds it until op 3 op3",
        ),
        (trace_of([1, 1, 1], [(PAGE, 0, 2)]), "read back at once", "backward reads it before"),
    ],
)
def test_each_reason_is_said(trace: Trace, kind: str, words: str) -> None:
    stay = why_it_stays(trace, 0)
    assert stay is not None
    assert stay.kind == kind
    assert words in stay.why


def test_what_nothing_saves_is_gone_by_itself() -> None:
    trace = a_trace()
    stay = why_it_stays(replace(trace, values=(replace(trace.values[0], saves=()),)), 0)
    assert stay is not None
    assert stay.kind == "not saved"


def test_versions_of_the_same_bytes_are_named() -> None:
    # Op 1 overwrites what op 0 made, and both contents are read in backward.
    specs = [OpSpec(PAGE, saves_input=False), OpSpec(PAGE, in_place=True, saves_output=True)]
    trace = build_trace([*specs, OpSpec(PAGE, saves_input=False)])
    (index,) = trace.saved
    first = trace.contents[trace.values[index].storage][0]
    values = list(trace.values)
    values[first] = replace(values[first], saves=values[index].saves)
    stay = why_it_stays(replace(trace, values=tuple(values)), index)
    assert stay is not None
    assert f"({first}, {index})" in stay.why
