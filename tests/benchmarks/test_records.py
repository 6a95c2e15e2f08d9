"""Records: lines that are whole, cut off or wrong, and what is kept of several files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import records
from benchmarks.cases import Case, key_of
from benchmarks.errors import GivenError
from tests.benchmarks.ended import status_of

CASE = Case("resnet50", "plain").as_json()
H200 = {"device_name": "H200", "torch": "2.11"}


def test_records_of_before_there_were_keys_are_read_and_merged(tmp_path: Path) -> None:
    old, path = {"net": "resnet50", "policy": "floor", "median_s": 0.5}, tmp_path / "old.jsonl"
    records.write(path, [old, old])
    assert key_of(old) is None
    assert records.merge([path]) == [old, old]


def test_half_a_line_is_not_a_record(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    records.append(path, {"a": 1})
    path.write_text(path.read_text() + '{"b": ')
    assert records.read(path) == [{"a": 1}]
    records.append(path, {"c": 2})
    assert records.read(path) == [{"a": 1}, {"c": 2}]


def test_a_crash_gives_way_to_a_result(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    records.write(paths[0], [CASE | {"outcome": "crash"}])
    records.write(paths[1], [CASE | {"outcome": "ok"}])
    assert records.merge(paths) == [CASE | {"outcome": "ok"}]


def test_a_last_line_without_an_end_is_a_record_where_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"a": 1}\n{"b": 2}')
    assert records.read(path) == [{"a": 1}, {"b": 2}]
    records.append(path, {"c": 3})
    assert path.read_text() == '{"a": 1}\n{"b": 2}\n{"c": 3}\n'


@pytest.mark.parametrize("wrong", ['{"a": 1', "[1]", "7", "\N{SNOWMAN}", "{'a': 1}"])
def test_a_line_that_is_no_record_is_named(wrong: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{wrong}\n{{"b": 2}}\n', "utf-8")
    with pytest.raises(GivenError, match=r"out\.jsonl, line 3"):
        records.read(path)


@pytest.mark.parametrize("other", [{"torch": "2.12"}, {"device_name": "B200"}])
def test_what_two_machines_measured_is_kept_of_both(other: Any, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    records.write(paths[0], [CASE | H200 | {"outcome": "ok"}])
    records.write(paths[1], [CASE | H200 | other | {"outcome": "ok"}])
    assert records.merge([*paths, *paths]) == [
        CASE | H200 | {"outcome": "ok"},
        CASE | H200 | other | {"outcome": "ok"},
    ]


@pytest.mark.parametrize("first", [True, False])
def test_a_crash_of_no_machine_gives_way_to_any(first: bool, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    records.write(paths[not first], [CASE | {"outcome": "crash"}])
    records.write(paths[first], [CASE | H200 | {"outcome": "ok"}])
    assert records.merge(paths) == [CASE | H200 | {"outcome": "ok"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("merge", "a", "missing", "-o", "c"), "there is no file missing"),
        (("merge", "a", "-o", "no/folder"), "no/folder cannot be written"),
        (("merge", "a", "wrong", "-o", "c"), "wrong, line 1"),
        (("run", "no/out.jsonl", "--toy"), "no/out.jsonl cannot be written"),
        (("run", "wrong", "--toy"), "wrong, line 1"),
        (("kernels", "no/out.jsonl", "--device", "cpu"), "no/out.jsonl cannot be written"),
        (("founders", "no/out.jsonl"), "no/out.jsonl cannot be written"),
        (("plot", "missing", "-o", "c.svg"), "there is no file missing"),
        (("plot", "a", "-o", "c.pdf"), "c.pdf: a figure ends in .svg or .png"),
    ],
)
def test_files_that_cannot_be_used_are_named_before_anything_is_done(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    records.write(tmp_path / "a", [CASE])
    (tmp_path / "wrong").write_text("wrong\n")
    (tmp_path / "c").write_text("kept")
    monkeypatch.chdir(tmp_path)
    assert status_of([*arguments], monkeypatch) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c", "wrong"]
    assert (tmp_path / "c").read_text() == "kept"
