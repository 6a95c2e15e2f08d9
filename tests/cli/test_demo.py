"""`belady demo`: what it says, when it fails, and once for real."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from belady.demo import DemoResult
from belady.demo.result import Both
from tests.cli.support import belady, child

GOOD = DemoResult(
    losses=tuple(Both(1 / n, 1 / n) for n in range(1, 31)),
    accuracy=Both(0.98, 0.98),
    seconds=Both(0.1, 0.12),
    differing=(),
    plain_peak_bytes=100 << 20,
    budget_bytes=40 << 20,
    measured_peak_bytes=39 << 20,
    report="It fits\n",
)


def demonstrate(monkeypatch: pytest.MonkeyPatch, result: DemoResult, *options: str) -> Any:
    seen: dict[str, Any] = {}

    def fake(device: str | None, *, report: Any, **options: Any) -> DemoResult:
        seen.update(options, device=device)
        report("progress")
        return result

    monkeypatch.setattr("belady.demo.demo", fake)
    monkeypatch.setattr("belady.cli.demo.measured", lambda *_: None)
    found = belady("demo", *options)
    return found, seen


def test_everything_held(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--device", "cpu", "--budget", "1GiB", "--iterations", "7", "--engine", "graph")
    found, seen = demonstrate(monkeypatch, GOOD, *options)
    assert found.exit_code == 0
    assert seen == {
        **{"device": "cpu", "budget": "1GiB", "iterations": 7},
        "engine": "graph",
    }
    lines = found.stdout.splitlines()
    assert lines[0] == "progress"
    assert "It fits" in lines
    assert lines[-1].startswith("All held: 30 losses and every weight are equal bit for bit")
    assert "39% of plain" in lines[-1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": (Both(1.0, 1.0), Both(1.0, 1.0000001))}, "1 losses differ"),
        ({"differing": ("stem.0.weight",)}, "weights differ (stem.0.weight)"),
        ({"measured_peak_bytes": (40 << 20) + 1}, "the peak is over the budget"),
        ({"measured_peak_bytes": None}, "the peak was not measured"),
    ],
)
def test_failure_exits_with_4(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], words: str
) -> None:
    found, _ = demonstrate(monkeypatch, replace(GOOD, **changes))
    assert found.exit_code == 4
    assert found.stdout.splitlines()[-1] == f"NOT held: {words}."


def test_a_different_loss_is_pointed_out() -> None:
    different = replace(GOOD, losses=(Both(1.0, 1.0), Both(1.0, 2.0)))
    assert [line.split()[-1] for line in str(different).splitlines()[1:3]] == ["same", "DIFFERENT"]


def test_too_few_iterations_to_verify_are_refused() -> None:
    assert belady("demo", "--iterations", "5").exit_code == 2


def test_kernels_with_other_bits_are_refused() -> None:
    found = belady("demo", "--engine", "inductor")
    assert found.exit_code == 2
    assert "have other bits" in found.stderr


def test_a_device_that_is_not_there_is_refused() -> None:
    assert belady("demo", "--device", "cuda:99").exit_code == 2
    assert belady("demo", "--device", "meta").exit_code == 2


def test_an_unreadable_budget_is_refused() -> None:
    found = belady("demo", "--device", "cpu", "--budget", "much")
    assert found.exit_code == 2
    assert "budget" in found.stderr


def test_absent_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    found = belady("demo", "--device", "cpu")
    assert found.exit_code == 1
    assert "pip install 'belady[demo]'" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_demonstration(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    command = [sys.executable, "-m", "belady", "demo", "--device", "cpu", "--iterations", "6"]
    done = subprocess.run(
        command,
        env={**child(), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Every save matched the plan." in done.stdout
    assert done.stdout.splitlines()[-1].startswith("All held: 6 losses and every weight")
