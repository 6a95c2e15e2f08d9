"""plot: a run in, a figure out, and what is said when it cannot be."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from belady.ir.files import save
from tests.cli.support import a_run, belady, documents


@pytest.fixture
def run(tmp_path: Path) -> Path:
    save(a_run(), tmp_path / "run.json.gz")
    return tmp_path / "run.json.gz"


@pytest.mark.parametrize("picture", ["memory", "timeline"])
@pytest.mark.parametrize("ending", ["svg", "PNG"])
def test_a_figure_is_written(picture: str, ending: str, run: Path, tmp_path: Path) -> None:
    output = tmp_path / f"figure.{ending}"
    sizes = set()
    for columns in (1, 2):
        result = belady("plot", picture, run, "-o", output, "--columns", columns)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == ""
        content = output.read_bytes()
        assert content.startswith(b"<?xml" if ending == "svg" else b"\x89PNG")
        sizes.add(content)
    assert len(sizes) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["memory", "none.json", "-o", "out.svg"], "No such file"),
        (["memory", "trace.json", "-o", "out.svg"], "a run is what `belady run --report FILE`"),
        (["memory", "run.json.gz", "-o", "none/out.svg"], "none/out.svg: No such file"),
        (["memory", "run.json.gz", "-o", "out.pdf"], "neither .svg nor .png"),
        (["memory", "run.json.gz", "-o", "out.svg", "--columns", 3], "--columns"),
        (["memory", "run.json.gz"], "--output"),
        (["pie", "run.json.gz", "-o", "out.svg"], "timeline"),
    ],
)
@pytest.mark.usefixtures("run")
def test_what_cannot_be_drawn_is_refused(
    arguments: list[object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents(tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = belady("plot", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_without_matplotlib_it_says_what_to_install(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = belady("plot", "memory", run, "-o", tmp_path / "figure.svg")
    assert result.exit_code == 1
    assert "pip install 'belady[plot]'" in result.stderr
    assert not (tmp_path / "figure.svg").exists()
