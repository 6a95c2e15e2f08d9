"""Documents survive a round trip; whatever else is read is refused with its path."""

from __future__ import annotations

import gc
import gzip
import json
import re
import sys
import time
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from belady.errors import DocumentError
from belady.ir import Budget, Plan, Run, Trace, files
from belady.ir.files import dumps, load, loads, save
from tests.support.strategies import hardware, random_trace, traces
from tests.unit.ir.documents import PLAN, TRACE, edited, measurements, plans, timelines
from tests.unit.report.drawn import recorded, runs

JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**6,
    2**63,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "device",
    "\0",
    [],
    [None],
    [[]],
    {},
    {"kind": "Keep"},
)


@given(traces() | hardware() | plans() | timelines() | measurements())
def test_round_trip(document: Any) -> None:
    text = dumps(document)
    again = loads(type(document), text)
    assert again == document
    assert dumps(again) == text


@settings(max_examples=20)
@given(runs())
def test_round_trip_of_a_run(run: Run) -> None:
    run = replace(run, notes=("a note",), versions=(("torch", "2.11.0"),))
    again = loads(Run, dumps(run))
    assert again == run
    assert again.trace.fingerprint == run.trace.fingerprint


def test_round_trip_of_a_run_that_was_recorded() -> None:
    assert loads(Run, dumps(recorded())) == recorded()


def test_form() -> None:
    assert dumps(PLAN) == (
        '{"belady":"Plan","version":1,"trace":"0000000000000000","planner":"test/1",'
        '"budget":{"device_bytes":1,"host_bytes":null,"disk_bytes":null},"assignments":[],'
        '"sections":[],"order_edits":[],"reuse_classes":[],"workspace":"unchanged",'
        '"layer_algorithms":[],"numerics":[],"predicted_peak_bytes":0,"predicted_seconds":0.0}'
    )


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{",
        '"belady"',
        "{}x",
        "\ufeff{}",
        "[" * 100_000,
        '{"a":' * 100_000,
        "[" * 900 + "]" * 900,
        "1" * 5000,
        "NaN",
        "1e400",
        '{"belady":"Plan","belady":"Plan"}',
        "__import__('os')",
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(DocumentError, match=r"^document: "):
        loads(Plan, text)


def test_deep_nesting_in_a_field_is_refused() -> None:
    deep = "[" * 50_000 + "]" * 50_000
    with pytest.raises(DocumentError, match=r"^document: nested too deeply"):
        loads(Plan, dumps(PLAN).replace("[]", deep, 1))


def test_repeated_key_is_refused_where_it_is() -> None:
    text = dumps(PLAN).replace('"host_bytes":null', '"host_bytes":null,"host_bytes":1')
    with pytest.raises(DocumentError, match=r"^budget: the key 'host_bytes' appears twice"):
        loads(Plan, text)


def test_missing_key_is_refused() -> None:
    with pytest.raises(DocumentError, match=r"^document: the key 'planner' is missing"):
        loads(Plan, dumps(PLAN).replace('"planner":"test/1",', ""))


def test_whole_number_serves_as_seconds() -> None:
    plan = loads(Plan, edited(PLAN, "predicted_seconds", 2))
    assert type(plan.predicted_seconds) is float


def test_long_list_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("belady.ir.codec.LONGEST_LIST", 3)
    with pytest.raises(DocumentError, match=r"^numerics: a list of 4, more than 3"):
        loads(Plan, edited(PLAN, "numerics", ["a", "b", "c", "d"]))


@pytest.mark.parametrize(
    "plan",
    [
        Plan("", "", Budget(-(2**63) - 1)),
        Plan("", "", Budget(1), predicted_seconds=float("nan")),
        Plan("", "\0", Budget(1)),
        Plan("", "", Budget(True)),
        Plan("", "", Budget(1), version=2),
        Plan("", "", Budget(1), numerics=["list"]),  # type: ignore[arg-type]
        Plan("", "", None),  # type: ignore[arg-type]
    ],
)
def test_nothing_is_written_that_cannot_be_read(plan: Plan) -> None:
    with pytest.raises(DocumentError):
        dumps(plan)


@given(st.data(), st.sampled_from([TRACE, PLAN]))
def test_mutated_documents_never_crash(data: st.DataObject, document: Trace | Plan) -> None:
    tree = json.loads(dumps(document))
    for _ in range(data.draw(st.integers(1, 3))):
        _mutate(data, tree)
    _try(type(document), json.dumps(tree))


@given(st.data())
def test_mutated_text_never_crashes(data: st.DataObject) -> None:
    text = dumps(PLAN)
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, min(len(text), start + 5)))
    _try(Plan, text[:start] + data.draw(st.text(max_size=5)) + text[end:])


def _try(kind: type, text: str) -> None:
    try:
        document: object = loads(kind, text)
    except DocumentError as error:
        assert re.match(r"\S+: .", str(error))  # noqa: PT017 (either outcome is fine)
    else:
        assert loads(kind, dumps(document)) == document


def _mutate(data: st.DataObject, tree: Any) -> None:
    """Replace, remove or add one item somewhere in the tree."""
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
            break
        place = place[key]
    action = data.draw(st.sampled_from(("replace", "remove", "add")))
    if action == "remove":
        del place[key]
    elif action == "add" and isinstance(place, list):
        place.append(deepcopy(data.draw(st.sampled_from(JUNK))))
    else:
        junk = deepcopy(data.draw(st.sampled_from(JUNK)))
        place[key if action == "replace" else "extra"] = junk


@pytest.mark.parametrize("name", ["plan.json", "plan.json.gz"])
def test_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    save(PLAN, path)
    first = path.read_bytes()
    save(PLAN, path)
    assert load(Plan, str(path)) == PLAN
    assert path.read_bytes() == first
    assert [item.name for item in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("step", ["os.fsync", "pathlib.Path.replace"])
def test_interrupted_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "plan.json"
    save(PLAN, path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(step, fail)
    with pytest.raises(OSError, match="No space left"):
        save(Plan("f" * 16, "other/1", Budget(2)), path)
    assert load(Plan, path) == PLAN
    assert list(tmp_path.iterdir()) == [path]


def test_refused_document_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(DocumentError):
        save(Plan("\0", "", Budget(1)), tmp_path / "plan.json")
    assert list(tmp_path.iterdir()) == []


def test_absent_file_is_the_systems_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(Plan, tmp_path / "plan.json")


@pytest.mark.parametrize("name", ["big.json", "big.json.gz"])
def test_large_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(files, "LARGEST_BYTES", 10_000)
    path = tmp_path / name
    content = b" " * 1_000_000
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    with pytest.raises(DocumentError, match=r"^document: at least \d+ bytes, more than 10000"):
        load(Plan, path)
    with pytest.raises(DocumentError, match=r"^document: at least"):
        loads(Plan, content.decode())


@pytest.mark.parametrize("cut", [0, 5, 40])
def test_broken_gzip_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "plan.json.gz"
    save(PLAN, path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DocumentError, match=r"^document: not "):
        load(Plan, path)
    path.write_bytes(b"plain text, whatever its name says")
    with pytest.raises(DocumentError, match=r"^document: not gzip"):
        load(Plan, path)


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(dumps(PLAN).encode("utf-16"))
    with pytest.raises(DocumentError, match=r"^document: not UTF-8"):
        load(Plan, path)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_rests_while_a_document_is_read(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, resting = dumps(TRACE), []
    monkeypatch.setattr(files, "validate", lambda _: resting.append(not gc.isenabled()))
    before = gc.isenabled()
    try:
        gc.enable() if enabled else gc.disable()
        loads(Trace, good)
        assert resting == [True]
        assert gc.isenabled() is enabled
        for bad in ("{", "[" * 100_000, "{}"):
            with pytest.raises(DocumentError):
                loads(Trace, bad)
            assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_large_trace_is_fast() -> None:
    trace = random_trace(0, 10_000)
    start = time.process_time()
    text = dumps(trace)
    written = time.process_time()
    assert loads(Trace, text) == trace
    read = time.process_time()
    # A third of a large trace; the bounds leave room for a slow, busy machine.
    assert written - start < 2
    assert read - written < 3
    assert sys.getsizeof(text) < 2**24
