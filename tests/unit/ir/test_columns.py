"""What is decoded many at once is what one by one would give, and nothing that it would refuse."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from belady.ir import Plan, Trace
from belady.ir.codec import codec
from belady.ir.files import dumps
from belady.ir.plan import Assignment
from belady.ir.scalars import Misfit
from belady.ir.timeline import Held, Span, Stall
from belady.ir.trace import Op, Storage, Value
from tests.unit.ir.documents import PLAN, TRACE
from tests.unit.ir.test_files import JUNK
from tests.unit.report.drawn import recorded

RUN = json.loads(dumps(recorded()))
MEASURED = RUN["measured"]
LISTS: list[tuple[Any, list[Any]]] = [
    (Op, json.loads(dumps(TRACE))["ops"]),
    (Storage, RUN["trace"]["storages"]),
    (Value, RUN["trace"]["values"]),
    (Assignment, RUN["plan"]["assignments"]),
    (Span, MEASURED["spans"]),
    (Stall, MEASURED["stalls"]),
    (Held, MEASURED["held"]),
]


def places(data: Any) -> list[tuple[Any, Any]]:
    """Every place in a tree of lists and objects."""
    keys = data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    inner = [place for key in keys for place in places(data[key])]
    return [(data, key) for key in keys] + inner


def one_by_one(kind: Any, items: list[Any]) -> list[Any] | None:
    try:
        return [codec(kind).decode(item) for item in items]
    except Misfit:
        return None


@pytest.mark.parametrize(("kind", "items"), LISTS, ids=lambda it: getattr(it, "__name__", ""))
def test_many_are_as_one_by_one(kind: Any, items: list[Any]) -> None:
    assert items
    assert codec(kind).many(items) == one_by_one(kind, items)
    assert codec(kind).many([]) == []


@pytest.mark.parametrize(("kind", "items"), LISTS, ids=lambda it: getattr(it, "__name__", ""))
def test_what_one_by_one_refuses_is_not_taken(kind: Any, items: list[Any]) -> None:
    items = copy.deepcopy(items[:3])
    refused = 0
    for owner, key in places(items):
        before = owner[key]
        for junk in JUNK:
            owner[key] = junk
            expected, found = one_by_one(kind, items), codec(kind).many(items)
            assert found is None or found == expected
            refused += expected is None
        owner[key] = before
        if isinstance(owner, dict):
            del owner[key]
            assert codec(kind).many(items) is None
            owner[key] = before
            owner["another"] = 1
            assert codec(kind).many(items) is None
            del owner["another"]
    assert refused > 5


def test_a_list_of_a_document_is_decoded_at_once() -> None:
    for cls, document in ((Trace, TRACE), (Plan, PLAN)):
        data = json.loads(dumps(document))
        data.pop("belady")
        assert codec(cls).many([data]) == [document]
