"""plan, simulate and doctor: documents in, documents or tables out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from belady.ir.files import load, loads
from belady.ir.hardware import HardwareProfile
from belady.ir.plan import Budget, Plan
from belady.ir.timeline import Timeline
from belady.ir.trace import Tier
from belady.memory.files import Files
from belady.planners import smallest_budget
from belady.units import format_bytes
from tests.cli.support import belady, documents, gpu, gpu_trace


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    return documents(tmp_path)


def test_plan_is_written_printed_and_simulated(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, hardware = files
    output = tmp_path / "plan.json"
    result = belady(
        "plan", trace, "--budget", "8MiB", "--hardware", hardware, "-o", output, "--json"
    )
    assert result.exit_code == 0, result.stderr
    plan = loads(Plan, result.stdout)
    assert plan == load(Plan, output)
    assert plan.budget.device_bytes == 8 << 20

    result = belady("simulate", trace, output, "--hardware", hardware, "--json")
    assert result.exit_code == 0, result.stderr
    timeline = loads(Timeline, result.stdout)
    assert timeline.peak(Tier.DEVICE) == plan.predicted_peak_bytes


def test_tables_name_what_matters(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, hardware = files
    output = tmp_path / "plan.json"
    result = belady("plan", trace, "--budget", "8MiB", "--hardware", hardware, "-o", output)
    assert result.exit_code == 0
    assert "offload to host" in result.stdout
    plan = load(Plan, output)
    assert format_bytes(plan.predicted_peak_bytes) in result.stdout
    result = belady("simulate", trace, output, "--hardware", hardware)
    assert result.exit_code == 0
    assert "waiting for copies" in result.stdout


def test_infeasible_budget_names_the_smallest(files: tuple[Path, Path]) -> None:
    trace, hardware = files
    result = belady("plan", trace, "--budget", "1MiB", "--hardware", hardware, "--json")
    assert result.exit_code == 3
    assert result.stdout == ""
    smallest = smallest_budget("auto", gpu_trace(), gpu(), Budget(0))
    assert f"--budget {smallest}" in result.stderr
    result = belady("plan", trace, "--budget", smallest, "--hardware", hardware, "--json")
    assert result.exit_code == 0


def test_a_document_of_another_kind_is_refused(files: tuple[Path, Path]) -> None:
    hardware = files[1]
    result = belady("plan", hardware, "--budget", "8MiB", "--hardware", hardware)
    assert result.exit_code == 2
    assert result.stderr.startswith("belady: ")
    assert "Traceback" not in result.stderr


def test_a_plan_for_another_trace_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    trace, hardware = files
    output = tmp_path / "plan.json"
    belady("plan", trace, "--budget", "8MiB", "--hardware", hardware, "-o", output)
    other = output.read_text().replace(gpu_trace().fingerprint, "0" * 16)
    output.write_text(other)
    result = belady("simulate", trace, output, "--hardware", hardware)
    assert result.exit_code == 2
    assert gpu_trace().fingerprint in result.stderr


def test_doctor_shows_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Files, "file_system", lambda *_: "ext4")  # wherever pytest's folder is
    arguments = ("doctor", "--device", "cpu", "--spill-dir", str(tmp_path))
    result = belady(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["belady"] == "HardwareProfile"
    assert loads(HardwareProfile, result.stdout).device == "cpu"
    result = belady(*arguments)
    assert result.exit_code == 0
    assert "device to disk" in result.stdout


def test_doctor_refuses_a_missing_spill_folder(tmp_path: Path) -> None:
    result = belady("doctor", "--device", "cpu", "--spill-dir", tmp_path / "none")
    assert result.exit_code == 1
    assert result.stderr.startswith("belady: spill folder")
