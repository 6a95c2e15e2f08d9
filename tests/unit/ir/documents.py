"""One document of each kind, and strategies of those that refer to nothing else."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from belady.ir import (
    Allocator,
    Assignment,
    Budget,
    Cause,
    Encode,
    Keep,
    Lane,
    Managed,
    Measured,
    Moved,
    Offload,
    OrderEdit,
    Plan,
    Recompute,
    Section,
    Span,
    Stall,
    Tier,
    TierPeak,
    Timeline,
    Workspace,
    dumps,
)
from tests.support.builder import OpSpec, build_trace
from tests.support.strategies import machine

TRACE = build_trace([OpSpec(parameter_bytes=8), OpSpec(lean_algorithm=True), OpSpec()])
PLAN = Plan("0" * 16, "test/1", Budget(1))
MACHINE = machine(
    "cuda", link_rate=1e10, disk=True, disk_rate=1e9, allocator=Allocator(512, 0.0, 0)
)

INTS = st.integers(-(2**63), 2**63 - 1)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


def edited(document: object, path: str, value: Any) -> str:
    """JSON of the document with the item at ``path`` (``a.0.b``) replaced."""
    data = json.loads(dumps(document))
    *outer, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place: Any = data
    for key in outer:
        place = place[key]
    place[last] = value
    return json.dumps(data)


def some(items: st.SearchStrategy) -> st.SearchStrategy:
    return st.lists(items, max_size=3).map(tuple)


def spans() -> st.SearchStrategy[Span]:
    return st.builds(Span, st.sampled_from(Lane), FLOATS, FLOATS, INTS, INTS)


def moved() -> st.SearchStrategy[Moved]:
    return st.builds(Moved, st.sampled_from(Lane), INTS, INTS)


def peaks() -> st.SearchStrategy[TierPeak]:
    return st.builds(TierPeak, st.sampled_from(Tier), INTS)


def timelines() -> st.SearchStrategy[Timeline]:
    stalls = st.builds(Stall, st.sampled_from(Cause), INTS, INTS, FLOATS, FLOATS)
    return st.builds(
        Timeline,
        FLOATS,
        FLOATS,
        some(peaks()),
        INTS,
        some(moved()),
        some(stalls),
        some(INTS),
        some(spans()),
    )


def measurements() -> st.SearchStrategy[Measured]:
    return st.builds(
        Measured,
        INTS,
        FLOATS,
        some(FLOATS),
        some(peaks()),
        stall_seconds=FLOATS,
        moved=some(moved()),
        defaults=some(st.tuples(TEXT, INTS)),
        spans=some(spans()),
    )


def plans() -> st.SearchStrategy[Plan]:
    decisions = st.one_of(
        st.just(Keep()),
        st.builds(Offload, st.sampled_from(Tier), INTS, INTS, INTS, INTS),
        st.builds(Recompute, some(INTS), INTS),
        st.builds(Encode, TEXT, INTS, INTS, INTS),
        st.builds(Managed, INTS, INTS, INTS, INTS, st.booleans()),
    )
    return st.builds(
        Plan,
        TEXT,
        TEXT,
        st.builds(Budget, INTS, st.none() | INTS, st.none() | INTS),
        assignments=some(st.builds(Assignment, INTS, decisions, TEXT)),
        sections=some(st.builds(Section, some(TEXT), INTS, INTS)),
        order_edits=some(st.builds(OrderEdit, INTS, INTS)),
        reuse_classes=some(some(INTS)),
        workspace=st.sampled_from(Workspace),
        layer_algorithms=some(st.tuples(INTS, TEXT)),
        numerics=some(TEXT),
        predicted_seconds=FLOATS,
    )
