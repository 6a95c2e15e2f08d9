"""explain: a run in, what was decided and what else could be out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from belady.cli import explain as verb
from belady.explain import Explanation
from belady.explain import explain as explain_run
from belady.ir.files import loads, save
from belady.ir.plan import Budget
from belady.ir.run import Run
from belady.ir.trace import Tier
from belady.planners import plan as make_plan
from belady.simulate import simulate
from tests.cli.support import a_run, belady, documents, gpu, gpu_trace


def tight_run() -> Run:
    trace, hardware = gpu_trace(), gpu()
    plan = make_plan("floor", trace, hardware, Budget(8 << 20))
    return Run(trace, hardware, plan, simulate(trace, hardware, plan))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(tight_run(), tmp_path / "run.json.gz")
    return tmp_path / "run.json.gz"


def moved() -> int:
    return min(tight_run().plan.decisions)


def test_one_value_is_explained(run: Path) -> None:
    result = belady("explain", run, moved())
    assert result.exit_code == 0, result.stderr
    assert result.stderr == ""
    assert f"Value {moved()}: saved by layer in layer" in result.stdout
    assert "as planned: offload to host" in result.stdout
    assert "The next best choice is to" in result.stdout


def test_without_what_the_largest_are_listed(run: Path) -> None:
    result = belady("explain", run)
    assert result.exit_code == 0, result.stderr
    assert "The largest 10 of " in result.stdout
    assert result.stdout.count("\nValue ") == 10


@pytest.mark.parametrize("what", ["layer3", "layer[0-3]"])
def test_modules_are_explained_as_one(what: str, run: Path) -> None:
    result = belady("explain", run, what)
    assert result.exit_code == 0, result.stderr
    assert f"Module {what}: " in result.stdout


def test_json_is_one_document(run: Path) -> None:
    for what in ([], [moved()], ["layer3"]):
        result = belady("explain", run, *what, "--json")
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["belady"] == "Explanation"
        asked = str(what[0]) if what else None
        assert loads(Explanation, result.stdout) == explain_run(tight_run(), asked)


def test_figures_as_planned_are_those_of_the_run(run: Path) -> None:
    planned = loads(Explanation, belady("explain", run, "--json").stdout).planned
    predicted = tight_run().predicted
    assert (planned.seconds, planned.peak_bytes) == (predicted.seconds, predicted.peak(Tier.DEVICE))


def test_a_run_that_was_not_measured_and_does_not_fit_is_explained(tmp_path: Path) -> None:
    plan = replace(a_run().plan, budget=Budget(1))
    save(replace(a_run(), plan=plan), tmp_path / "run.json")
    result = belady("explain", tmp_path / "run.json")
    assert result.exit_code == 0, result.stderr
    assert "The plan as it is may not run" in result.stdout
    assert "Note: the run was predicted by another version" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.json"], "No such file"),
        (["trace.json"], "a run is what `belady run --report FILE`"),
        (["run.json.gz", "layr3"], "layer3"),
        (["run.json.gz", "9999"], "there is no value 9999"),
        ([], "RUN"),
    ],
)
@pytest.mark.usefixtures("run")
def test_what_cannot_be_explained_is_refused(
    arguments: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path)
    monkeypatch.chdir(tmp_path)
    result = belady("explain", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_a_plan_for_another_trace_is_refused(tmp_path: Path) -> None:
    # The file is written as text: no document would hold it.
    save(tight_run(), tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").write_text(text.replace(gpu_trace().fingerprint, "0" * 16))
    result = belady("explain", tmp_path / "run.json")
    assert result.exit_code == 2
    assert gpu_trace().fingerprint in result.stderr


def test_who_waits_long_is_told_what_for(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "_SPEAK_AFTER_S", 0.0)
    result = belady("explain", run, "--json")
    assert result.stderr.count("belady: simulating the choices for value ") == 10
    loads(Explanation, result.stdout)
