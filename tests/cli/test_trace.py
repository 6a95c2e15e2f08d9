"""trace: a run in, a timeline out, and what is said when it cannot be."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from belady.ir.files import save
from tests.cli.support import a_run, belady, documents


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(a_run(), tmp_path / "run.json.gz")
    return tmp_path / "run.json.gz"


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    steps = [{"ph": "X", "name": f"ProfilerStep#{n}", "ts": 10.0 * n, "dur": 1} for n in (2, 3)]
    path.write_text(json.dumps({"traceEvents": steps}))
    return path


def test_a_timeline_is_written(run: Path, tmp_path: Path) -> None:
    output = tmp_path / "timeline.json.gz"
    result = belady("trace", run, "-o", output)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == ""
    assert "timeline.json.gz: open it at https://ui.perfetto.dev" in result.stderr
    assert json.loads(gzip.decompress(output.read_bytes()))["belady"]["planner"] == "baseline/1"


def test_it_is_drawn_beside_a_profile_at_a_step(run: Path, profile: Path, tmp_path: Path) -> None:
    output = tmp_path / "timeline.json"
    for at, moment in (([], 20.0), (["--merge-at", 3], 30.0)):
        result = belady("trace", run, "-o", output, "--merge", profile, *at)
        assert result.exit_code == 0, result.stderr
        events = json.loads(output.read_text())["traceEvents"]
        assert [event["name"] for event in events[:2]] == ["ProfilerStep#2", "ProfilerStep#3"]
        assert [event["ts"] for event in events if event["ph"] == "C"] == [moment]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none.json", "-o", "out.json"], "No such file"),
        (["trace.json", "-o", "out.json"], "a run is what `belady run --report FILE` writes"),
        (["run.json.gz", "-o", "none/out.json"], "none/out.json: No such file"),
        (["run.json.gz", "-o", "out.json", "--merge", "none.json"], "No such file"),
        (["run.json.gz", "-o", "out.json", "--merge", "run.json.gz"], "not a Chrome trace"),
        (["run.json.gz", "-o", "out.json", "--merge", "profile.json", "--merge-at", 9], "2, 3"),
        (["run.json.gz", "-o", "out.json", "--merge-at", 3], "--merge"),
        (["run.json.gz"], "--output"),
    ],
)
@pytest.mark.usefixtures("run", "profile")
def test_what_cannot_be_drawn_is_refused(
    arguments: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = belady("trace", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before
