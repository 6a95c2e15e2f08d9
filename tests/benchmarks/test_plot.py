"""The verb that draws a frontier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import plot, records
from tests.benchmarks.ended import status_of
from tests.benchmarks.test_figures import record

HERE = [record("checkpoint", 5, 0.1), record("belady:auto", 4, 0.2)]
POINTS = plot.points(HERE)


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ({"sizes": {"batch": 128}}, "resnet50, batch 128, bf16"),
        ({"device_name": "another"}, "resnet50, bf16, another, torch 2"),
        ({"torch": "3"}, "resnet50, bf16, a device, torch 3"),
        ({"channels_last": True}, "resnet50, bf16, channels_last"),
        ({"toy": True}, "resnet50, bf16, toy size"),
        ({"precision": "tf32"}, "resnet50, tf32"),
        ({"workload": "vit"}, "vit, bf16"),
    ],
)
def test_a_figure_is_of_one_setting_on_one_machine(
    other: dict[str, Any],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "points", lambda found: drawn.extend(found) or POINTS)
    there = [{**it, **other} for it in HERE]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.svg"
    records.write(source, [*HERE, *there])
    command = ["plot", str(source), "-o", str(out)]
    assert status_of(command, monkeypatch) == 2
    assert f"\n  {name!r}" in capsys.readouterr().err
    assert status_of([*command, "--setting", "another"], monkeypatch) == 2
    assert not out.exists()
    assert status_of([*command, "--setting", name], monkeypatch) == 0
    assert drawn == there
    assert out.exists()
